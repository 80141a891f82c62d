"""How it is computed: forms that equal the definition (ops/recurrent.py), and what they cost.

    chunkwise.py       chunk after chunk           fused_recurrent.py     token by token, for decoding
    chunk.py           one chunk, matrix by matrix dispatch.py    which optimisers have a fast form, and theirs
    chunk_context.py           what a chunk is made of     chunk_layout.py            where tokens lie in chunks
    matrix_inputs.py         phi of keys and queries     kernel_cache.py         matrices on phi*
    online_gradient.py, triangular.py errors that see the chunk   mirror_map.py        retentions with a mirror map
    triangular.py          those of windows > 1        delta_scan.py            all chunks at once, for the delta rule
    fast_weight.py     one matrix over one chunk, on which all of this rests    decay_masks.py, banded.py   its weights
    muon_steps.py      the same under Muon         muon_space.py          in which space that is computed
    newton_schulz.py, gram_eigenvalues.py     Newton-Schulz, by Gram matrices and by eigenvalues
    compiling.py, compiler_passes.py               torch.compile      cost.py, work.py         bytes and multiply-adds
    cuda_graphs.py         calls as CUDA graphs

The public names are in ``atlas_memory.memory``.
"""
