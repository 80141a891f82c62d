"""How a memory is computed: forms that equal one another, and what they cost.

    recurrent.py          the definition, token by token        fused_recurrent.py    the same for decoding
    chunkwise.py          chunk after chunk                     chunk.py              one chunk, matrix by matrix
    chunk_layout.py       where tokens lie in chunks            chunk_context.py      what a chunk is made of
    fast_weight.py        one matrix over one chunk: the equations, and its products
    decay_masks.py        how much of each update is in it      banded.py             windows and decays as matrices
    matrix_inputs.py      phi of keys and queries, and all that does not depend on the memory
    online_gradient.py    errors that see the chunk             triangular.py         the systems that they solve
    plain_steps.py        gradient descent, momentum            muon_steps.py         Muon; muon_space.py: the space
    mirror_map.py         non-linear retention                  kernel_cache.py       infinite-dimensional features
    delta_scan.py         the delta rule, all chunks at once    newton_schulz.py, gram_eigenvalues.py
    dispatch.py           which rule has which form             precision.py          dtypes, and the checks of inputs
    flops.py              bytes and multiply-adds               compiling.py, cuda_graphs.py, triton/

The public names are in ``atlas_memory.memory``.
"""
