"""A hierarchy of memories against a literal token loop: explicit resets, an explicit P, and `recurrent` inside."""

import pytest
import torch

from atlas_memory import RULES, NeuralMemory
from atlas_memory.layers.tnt import HierarchicalMemory, HierarchicalState, Hierarchy
from atlas_memory.memory import Gates, initial_state, recurrent

from ..ops.problems import error

DIM, HEADS = 4, 2
NEAR = {"rtol": 0.0, "atol": 1e-8}
SHAPES = [
    Hierarchy(6, (2, 4), 8),
    Hierarchy(5, (3,), 3, project="chunk"),
    Hierarchy(4, (1, 6), 12, project="chunk"),
    Hierarchy(16, (1,), 5),
    Hierarchy(1, (4,), 4, project=None),
]


def memory(rule: str, hierarchy: Hierarchy, gates: bool = True) -> HierarchicalMemory:
    torch.manual_seed(0)
    chosen = RULES[rule] if RULES[rule].window.size == 1 else RULES[rule].vary(window={"size": 3})
    made = HierarchicalMemory(DIM, HEADS, chosen, hierarchy, gates).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return made


def inputs(batch: int, time: int, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, batch, HEADS, time, DIM, dtype=torch.float64, generator=generator)
    return [q, 1.3 * k, v]


def gates_of(gates: Gates, i: int, t: int) -> Gates:
    """The gates of token t for memory i."""
    return gates.map(lambda gate: gate[:, i * HEADS : (i + 1) * HEADS, t : t + 1])


def written_out(module: HierarchicalMemory, q, k, v):
    """One row at a time, TNT Eqs. 5-7 and 14-15: the outputs, and what is held after the last token."""
    h = module.hierarchy
    gates = module.gates(k.transpose(1, 2).flatten(2))
    held = [initial_state(m.rule, m.params.initial, k) for m in module.memories]
    zero = torch.zeros(*k.shape[:2], DIM, DIM, dtype=k.dtype)
    keys = [zero] * len(h.local_chunks)
    outputs = []
    for t in range(q.shape[2]):
        q_t, k_t, v_t = (x[:, :, t : t + 1] for x in (q, k, v))
        y, held[0] = recurrent(
            module.memories[0].rule, module.memories[0].params, q_t, k_t, v_t, gates_of(gates, 0, t), held[0]
        )
        for i, chunk in enumerate(h.local_chunks):
            m = module.memories[i + 1]
            if t % h.shard == 0:
                held[i + 1] = initial_state(m.rule, m.params.initial, k)
            if t % (h.shard if h.project == "shard" else chunk) == 0:
                keys[i] = zero
            keys[i] = keys[i] + k_t.mT @ k_t / (k_t.square().sum(-1, keepdim=True))
            asked = q_t if h.project is None else (keys[i] @ q_t.mT).mT
            own = gates_of(gates, i + 1, t)
            read, held[i + 1] = recurrent(m.rule, m.params, asked, k_t, v_t, own, held[i + 1])
            y = y + read
        outputs.append(y)
    return torch.cat(outputs, 2), held, keys


@pytest.mark.extended
@pytest.mark.parametrize("rule", ["tnt", "titans", "omeganet", "atlas", "hope", "memora"])
@pytest.mark.parametrize("hierarchy", SHAPES, ids=str)
def test_equals_the_token_loop(rule, hierarchy):
    """Outputs, state and gradients; 17 tokens end within a shard of every shape."""
    module = memory(rule, hierarchy)
    given = [x.requires_grad_() for x in inputs(2, 17)]
    weight = torch.randn(given[0].shape, dtype=torch.float64)
    wanted, held, keys = written_out(module, *given)
    leaves = [*given, *module.parameters()]

    def gradients(y, weights):
        return torch.autograd.grad((y * weight).sum() + sum(w.square().sum() for w in weights), leaves)

    y, state = module(*given)
    torch.testing.assert_close(y, wanted, **NEAR)
    local = range(1, len(module.memories))
    for i in [0, *local]:
        for got, expected in zip(state.memories[i].matrices, held[i].matrices, strict=True):
            torch.testing.assert_close(got.weights, expected.weights, **NEAR)
            torch.testing.assert_close(got.sums, expected.sums, **NEAR)
        assert state.memories[i].seen.tolist() == [17 if i == 0 else 17 % hierarchy.shard] * 2
    for p, end, chunk in zip(state.projections, keys, hierarchy.local_chunks, strict=False):
        span = hierarchy.shard if hierarchy.project == "shard" else chunk
        torch.testing.assert_close(p, end if 17 % span else torch.zeros_like(end), **NEAR)

    def ends(memories):
        return [w for m in memories for w in m.weights]

    # By norm, as in tests/memory: all entries of a gradient carry the rounding of its largest.
    both = zip(gradients(y, ends(state.memories)), gradients(wanted, ends(held)), strict=True)
    assert max(error(a, b) for a, b in both) < 1e-8


@pytest.mark.parametrize("project", ["shard", "chunk", None])
def test_rows_of_any_phase_and_length(project):
    """Two ragged calls, the second from rows at different places of their shards."""
    module = memory("titans", Hierarchy(5, (2, 4), 8, project))
    q, k, v = inputs(4, 40)
    first, second = torch.tensor([0, 3, 8, 13]), torch.tensor([17, 1, 0, 9])

    def call(start, length, state):
        width = int(length.max())
        at = (start[:, None] + torch.arange(width)).clamp(max=39)
        pieces = [torch.stack([x[i][:, at[i]] for i in range(4)]) for x in (q, k, v)]
        garbage = (torch.arange(width) >= length[:, None])[:, None, :, None]
        pieces = [x.masked_fill(garbage, 1e3) for x in pieces]
        gates = module.gates(pieces[1].transpose(1, 2).flatten(2))
        gates = Gates(gates.eta, gates.alpha, gates.theta, length=length)
        return module(*pieces, gates, state)

    y1, state = call(torch.zeros(4, dtype=torch.int64), first, None)
    y2, state = call(first, second, state)
    for row in range(4):
        total = int(first[row] + second[row])
        alone, end = module(*(x[row : row + 1, :, :total] for x in (q, k, v)))
        read = torch.cat([y1[row, :, : first[row]], y2[row, :, : second[row]]], 1)
        torch.testing.assert_close(read, alone[0], **NEAR)
        for mine, its in zip(state.tensors(), end.tensors(), strict=True):
            torch.testing.assert_close(mine[row], its[0], **NEAR)


@pytest.mark.parametrize("project", ["shard", "chunk", None])
def test_shards_are_independent_of_each_other(project):
    """The local part of a shard is what a memory that begins there says; a shard before it changes nothing."""
    module = memory("omeganet", Hierarchy(4, (2, 4), 8, project))
    with torch.no_grad():
        # eta 0 and alpha 1: the global memory writes and forgets nothing, and what differs is local.
        module.gates[0].weight.zero_()
        module.gates[0].bias.fill_(1e4)[:HEADS] = -1e4
    q, k, v = inputs(2, 24)
    y, _ = module(q, k, v)
    k2, v2 = k.clone(), v.clone()
    k2[:, :, :8], v2[:, :, :8] = torch.randn(2, 2, HEADS, 8, DIM, dtype=torch.float64)
    changed, _ = module(q, k2, v2)
    assert not torch.equal(changed[:, :, :8], y[:, :, :8])
    # Momentum, window tokens and P among it: nothing of the first shard is in the second.
    assert torch.equal(changed[:, :, 8:], y[:, :, 8:])
    one_by_one = [module(q[:, :, s], k[:, :, s], v[:, :, s])[0] for s in map(slice, (0, 8, 16), (8, 16, 24))]
    torch.testing.assert_close(torch.cat(one_by_one, 2), y, **NEAR)


def test_smaller_local_chunks_are_the_same_weights():
    """Stage 2: what was trained is read with other chunks; at a chunk of one token decoding is the exact recurrence."""
    stage1, stage2 = memory("tnt", Hierarchy(8, (4,), 8)), memory("tnt", Hierarchy(8, (1,), 8))
    stage2.load_state_dict(stage1.state_dict())
    q, k, v = inputs(1, 20)
    y, _ = stage2(q, k, v)
    torch.testing.assert_close(y, written_out(stage2, q, k, v)[0], **NEAR)
    assert not torch.allclose(y, stage1(q, k, v)[0])


def test_retrieving_asks_every_memory_without_projection():
    module = memory("titans", Hierarchy(4, (2,), 8))
    q, k, v = inputs(2, 11)
    _, state = module(q, k, v)
    answers = [m.retrieve(q, own) for m, own in zip(module.memories, state.memories, strict=True)]
    torch.testing.assert_close(module.retrieve(q, state), answers[0] + answers[1])
    empty = module(q[:, :, :0], k[:, :, :0], v[:, :, :0])[1]
    torch.testing.assert_close(module.retrieve(q), module.retrieve(q, empty))


def test_the_layer_without_writes_keeps_its_state():
    torch.manual_seed(0)
    layer = NeuralMemory(8, 2, "titans", hierarchy=Hierarchy(4, (2,), 8))
    _, state = layer(torch.randn(2, 11, 8))
    layer.writes = False
    _, after = layer(torch.randn(2, 11, 8), state)
    assert isinstance(after.memory, HierarchicalState) and after.nbytes == state.nbytes
    for a, b in zip(state.memory.tensors(), after.memory.tensors(), strict=True):
        assert torch.equal(a, b)


def test_half_precision_and_channel_wise_gates():
    layer = NeuralMemory(8, 2, "omeganet", gate_rank=2, hierarchy={"global_chunk": 4, "local_chunks": [2], "shard": 8})
    layer = layer.to(torch.bfloat16)
    y, state = layer(torch.randn(2, 11, 8, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16 and y.isfinite().all()
    assert all(t.dtype == torch.float32 for t in state.memory.tensors() if t.is_floating_point())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, _ = layer.float()(torch.randn(2, 3, 8), state.map(torch.clone))
    assert y.isfinite().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"local_chunks": [3]}, "shard=8 must be a multiple of the local chunk 3"),
        ({"local_chunks": []}, r"local_chunks must list .* got \[\]"),
        ({"local_chunks": 4}, "local_chunks must list .* got 4"),
        ({"local_chunks": [0]}, "each of local_chunks must be an integer >= 1, got 0"),
        ({"global_chunk": 2.0}, "global_chunk must be an integer >= 1, got 2.0"),
        ({"shard": True}, "shard must be an integer >= 1, got True"),
        ({"project": "row"}, "project must be 'shard', 'chunk' or None, got 'row'"),
        ({"size": 3}, "must map global_chunk, local_chunks, shard, project .optional. to values; got {.*'size'"),
    ],
)
def test_wrong_hierarchies_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        Hierarchy.of({"global_chunk": 8, "local_chunks": [4], "shard": 8} | changes)


def test_wrong_arguments_are_named():
    h = Hierarchy(8, (4,), 8)
    with pytest.raises(ValueError, match="must map global_chunk"):
        Hierarchy.of({"global_chunk": 8})
    with pytest.raises(ValueError, match="Exponential features"):
        HierarchicalMemory(4, 2, "deeptransformer", h)
    with pytest.raises(ValueError, match="chunk_size=4 has no use beside a hierarchy"):
        NeuralMemory(8, 2, chunk_size=4, hierarchy=h)
    q, k, v = inputs(1, 3)
    with pytest.raises(ValueError, match="gates=False: pass gates="):
        memory("tnt", h, gates=False)(q, k, v)
    with pytest.raises(ValueError, match=r"gates must have 2 \* 2 heads, .* got \[1, 2, 3\]"):
        memory("tnt", h)(q, k, v, Gates(q[..., 0].sigmoid()))
    _, state = memory("tnt", Hierarchy(8, (4, 8), 8))(q, k, v)
    with pytest.raises(ValueError, match=r"state has \(3, 1\) memories and projections, this hierarchy \(2, 1\)"):
        memory("tnt", h)(q, k, v, state=state)
    with pytest.raises(ValueError, match=r"state has \(3, 1\) memories and projections, this hierarchy \(2, 1\)"):
        memory("tnt", h).retrieve(q, state)
    two = [memory("tnt", Hierarchy(8, (4, 8), 8, project=project)) for project in ("shard", "chunk", None)]
    for one in two:
        for other in two:
            if one is not other:
                with pytest.raises(ValueError, match=r"state has .* projections, this hierarchy"):
                    other(q, k, v, state=one(q, k, v)[1])
    for wrong, message in (
        ((q.transpose(1, 2), k, v), "q must be .*, got"),
        ((q, [1], v), "k must be .*got a list"),
        ((q, k, v, q), "gates must have .* got a Tensor"),
    ):
        with pytest.raises(ValueError, match=message):
            memory("tnt", h)(*wrong)
    _, state = memory("tnt", h)(q, k, v)
    with pytest.raises(ValueError, match="of another rule, batch or width"):
        memory("tnt", h)(*inputs(2, 3), state=state)
