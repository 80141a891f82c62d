"""How it is computed: forms that equal the definition (rules/definition.py), and what they cost.

    chunkwise.py       chunk after chunk           incremental.py     token by token, for decoding
    chunk.py           one chunk, matrix by matrix counterparts.py    which optimisers have a fast form, and theirs
    parts.py           what a chunk is made of     grid.py            where tokens lie in chunks
    lifting.py         phi of keys and queries     columns.py         matrices on phi*
    errors.py, live.py errors that see the chunk   settling.py        retentions that settle
    blocks.py          those of windows > 1        scan.py            all chunks at once, for the delta rule
    fast_weight.py     one matrix over one chunk, on which all of this rests    schedules.py, bands.py   its weights
    muon_steps.py      the same under Muon         spaces.py          in which space that is computed
    fast_newton_schulz.py, gram_eigenvalues.py     Newton-Schulz, by Gram matrices and by eigenvalues
    compiling.py, compiler_passes.py               torch.compile      cost.py, work.py         bytes and multiply-adds
    graphed.py         calls as CUDA graphs

The public names are in ``atlas_memory.memory``.
"""
