"""A document in a row of several is the document alone."""

import pytest
import torch
from accelerate.utils import send_to_device

from atlas_memory.layers.varlen import PackedRows
from atlas_memory.models import AtlasConfig, AtlasForCausalLM
from atlas_memory.models.cache import AtlasCache
from tests.ops.problems import error

from .mixers import DIM, MIXERS, build, grows

TIME = 23
STARTS = ((0, 1, 5, 6, 17), (8, 9))  # the second row goes on with an earlier document first
PIECES = ((0, 0, 1), (0, 1, 5), (0, 5, 6), (0, 6, 17), (0, 17, 23), (1, 0, 8), (1, 8, 9), (1, 9, 23))


def problem(name):
    mixer = build(name, torch.float64)
    x = torch.randn(2, TIME, DIM, dtype=torch.float64, requires_grad=True)
    starts = torch.zeros(2, TIME)
    for row, places in enumerate(STARTS):
        starts[row, list(places)] = 1
    return mixer, x, starts


def apart(mixer, x, before=None):
    """Every document alone, put together; the second row's first one after `before`."""
    found = [mixer(x[r : r + 1, a:b], before if (r, a) == (1, 0) else None) for r, a, b in PIECES]
    ys = [y for y, _ in found]
    return torch.cat([torch.cat(ys[:5], 1), torch.cat(ys[5:], 1)]), (found[4][1], found[7][1])


def gradients(y, mixer, x):
    wanted = [x, *mixer.parameters()]
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return torch.autograd.grad((y * weights).sum(), wanted, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("name", MIXERS)
def test_sequences_of_packed_rows_are_read_as_if_alone(name):
    """The first of the second row continues from a state; beside states that grow that is refused."""
    mixer, x, starts = problem(name)
    before = mixer(torch.randn(2, 6, DIM, dtype=torch.float64))[1].detach()
    if grows(name):
        with pytest.raises(ValueError, match="has a state that grows"):
            mixer(x, before, document_starts=starts)
        before = None
    y, state = mixer(x, before, document_starts=starts)
    alone, after = apart(mixer, x, None if before is None else before.map(lambda t: t[1:]))
    assert error(y, alone) < 1e-8
    for got, wanted in zip(gradients(y, mixer, x), gradients(alone, mixer, x), strict=True):
        assert (got - wanted).norm() <= 1e-8 * (1 + wanted.norm())
    if not grows(name):
        rows = [list(one.tensors()) for one in after]
        for i, tensor in enumerate(state.tensors()):
            assert error(tensor.double(), torch.cat([rows[0][i], rows[1][i]]).double()) < 1e-8


@pytest.mark.parametrize("name", ["lmm-atlas", "lmm-titans", "lmm-tnt-hierarchy", "mac-titans", "hope", "attention"])
def test_no_document_sees_another(name):
    """Bitwise, whatever another holds."""
    mixer, x, starts = problem(name)
    for size in (1e3, torch.nan):
        other = x.detach().clone()
        other[0, 6:17] = size * torch.randn(11, DIM, dtype=torch.float64)
        y, z = (mixer(part, document_starts=starts)[0] for part in (x, other))
        same = (y == z).all(-1)
        assert same[0, :6].all() and same[0, 17:].all() and same[1].all() and not same[0, 6:17].any()


@pytest.mark.parametrize("name", ["lmm-atlas", "mag-persistent", "attention"])
def test_padding_between_documents(name):
    mixer, x, starts = problem(name)
    mask = torch.rand(2, TIME) > 0.3
    y, _ = mixer(x, None, mask, document_starts=starts)
    for r, a, b in PIECES:
        real = mask[r, a:b]
        assert (y[r, a:b][~real] == 0).all()
        if real.any():
            assert error(y[r, a:b][real], mixer(x[r : r + 1, a:b][:, real])[0][0]) < 1e-8


@pytest.mark.parametrize("name", [name for name in MIXERS if not grows(name)])
def test_a_mark_at_padding_holds_in_the_next_call(name):
    """Rows that end in padding, or are all padding, in the call in which their next document is marked."""
    mixer, x, _ = problem(name)
    mask, starts = torch.ones(2, TIME), torch.zeros(2, TIME)
    mask[0, 6:12], starts[0, 8] = 0, 1
    mask[1, 9:14], starts[1, [3, 9, 11]] = 0, 1
    with torch.no_grad():
        whole, end = mixer(x, None, mask, starts)
        for pieces in ([6, 6, 11], [10, 2, 11], [11, 1, 2, 9]):
            parts, state = [], None
            for part in zip(*(t.split(pieces, 1) for t in (x, mask, starts)), strict=True):
                y, state = mixer(part[0], state, *part[1:])
                parts.append(y)
            assert error(torch.cat(parts, 1), whole) < 1e-8
            for got, wanted in zip(state.tensors(), end.tensors(), strict=True):
                assert error(got.double(), wanted.double()) < 1e-8


def test_padding_at_most_doubles_what_is_read():
    """However unlike the lengths are; and what is alike is read together."""
    starts = torch.zeros(8, 1000)
    starts[:, 0] = 1
    starts[1:, :] = 1  # seven rows of documents of one token, beside one of a thousand
    groups = PackedRows.from_starts(starts, starts, torch.nn.Identity()).groups
    assert [list(g.index.shape) for g in groups] == [[1, 1000], [7000, 1]]
    for _ in range(20):
        starts = torch.rand(4, 200) < torch.rand(4, 1) ** 4
        found = PackedRows.from_starts(starts, starts, torch.nn.Identity())
        if found is not None:
            assert sum(g.index.numel() for g in found.groups) <= 2 * starts.numel()
            x = torch.arange(800.0).view(4, 200)
            assert torch.equal(found.pack([g.unpack(x) for g in found.groups]), x)
    starts = torch.zeros(4, 200)
    starts[2, 90] = 1
    assert len(PackedRows.from_starts(starts, starts, torch.nn.Identity()).groups) == 1


def test_wrong_starts_are_refused():
    mixer, x, starts = problem("lmm-titans")
    with pytest.raises(ValueError, match=r"document_starts has shape \[2, 22\] but the tokens are .* \[2, 23\]"):
        mixer(x, document_starts=starts[:, 1:])
    with pytest.raises(ValueError, match="document_starts has negative numbers or NaN"):
        mixer(x, document_starts=torch.full_like(x[..., 0], torch.nan))
    with pytest.raises(ValueError, match=r"mask must be bool or numbers, got torch\.complex64"):
        mixer(x, mask=torch.ones(x.shape[:2], dtype=torch.complex64))
    state = mixer(x[:1])[1]
    with pytest.raises(ValueError, match="x has batch size 2 but the state has 1"):
        mixer(x, state, document_starts=starts)
    y, _ = mixer(x, document_starts=torch.zeros(2, TIME))
    assert torch.equal(y, mixer(x)[0])
    with pytest.raises(ValueError, match=r"mask must be a tensor \[batch, time\], got a list"):
        mixer(x, mask=[[1] * TIME] * 2, document_starts=starts)
    assert mixer(x[:, :0], document_starts=starts[:, :0])[0].shape == (2, 0, DIM)
    assert mixer(x[:, :0], mask=starts[:, :0], document_starts=starts[:, :0])[0].shape == (2, 0, DIM)


def model(**options):
    torch.manual_seed(0)
    chunk = {} if options.get("block") == "attention" else {"chunk_size": 4}
    config = AtlasConfig.preset("nano", hidden_size=16, num_attention_heads=2, **chunk, **options)
    return AtlasForCausalLM(config).double().train()


@pytest.mark.parametrize("options", [{"rule": "titans"}, {"rule": "atlas"}, {"block": "mac"}, {"block": "hope"}])
def test_a_model_reads_packed_rows_in_segments(options):
    """Losses and gradients of packed rows, read at once or in segments that carry the state and its graph, are those of
    every document alone."""
    net = model(**options)
    ids = torch.randint(0, 256, (2, TIME + 1))
    starts = torch.zeros(2, TIME, dtype=torch.bool)
    for row, places in enumerate(STARTS):
        starts[row, list(places)] = True

    def loss(inputs, labels, **more):
        out = net(input_ids=inputs, shift_labels=labels, **more)
        value = torch.nn.functional.cross_entropy(out.logits.transpose(1, 2), labels, reduction="none")
        assert abs(out.loss - value.mean()) < 1e-5  # transformers computes it in float32
        return value.sum() / (2 * TIME)

    alone = sum(loss(ids[r : r + 1, a:b], ids[r : r + 1, a + 1 : b + 1]) for r, a, b in PIECES)
    packed = loss(ids[:, :-1], ids[:, 1:], document_starts=starts)
    cache = AtlasCache(net.config.num_hidden_layers, keep_graph=True)
    cuts = ((0, 7), (7, 8), (8, TIME))
    parts = [
        loss(ids[:, a:b], ids[:, a + 1 : b + 1], document_starts=starts[:, a:b], past_key_values=cache) for a, b in cuts
    ]
    parameters = list(net.parameters())
    wanted = torch.autograd.grad(alone, parameters, materialize_grads=True, allow_unused=True)
    for other in (packed, sum(parts)):
        assert abs(other - alone) < 1e-8
        for got, want in zip(torch.autograd.grad(other, parameters, allow_unused=True), wanted, strict=True):
            assert (got - want).norm() <= 1e-8 * (1 + want.norm())
    assert cache.get_seq_length() == TIME
    assert any(t.requires_grad for t in cache.blocks[0].state.tensors())
    cache.detach()
    assert not any(t.requires_grad for t in cache.blocks[0].state.tensors())


def test_a_cache_keeps_no_graph_by_default():
    net = model(rule="titans")
    out = net(input_ids=torch.randint(0, 256, (1, 9)), use_cache=True)
    assert not any(t.requires_grad for t in out.past_key_values.blocks[0].state.tensors())


def test_an_anchored_cache_trains_what_its_states_began_with():
    """The gradient of a carried state is M_0's too, and that of a document that begins inside a row is counted once."""
    net = model(rule="titans")
    ids, starts = torch.randint(0, 256, (2, 12)), torch.zeros(2, 12)
    starts[0, 5] = 1
    initial = [p for name, p in net.named_parameters() if ".initial." in name]

    def gradients(straight_through: bool, by_hand: bool):
        cache = AtlasCache(net.config.num_hidden_layers, straight_through=straight_through)
        net(input_ids=ids.flip(1), past_key_values=cache)
        for block, layer in zip(cache.blocks, net.model.layers, strict=True):
            if by_hand:
                fresh = layer.mixer.initial_state().tensors()
                block.state = block.state.map(lambda t, fresh=fresh: (new := next(fresh)) - new.detach() + t)
        loss = net(input_ids=ids, labels=ids, document_starts=starts, past_key_values=cache).loss
        return torch.autograd.grad(loss, initial)

    for one, two, three in zip(gradients(True, False), gradients(False, True), gradients(False, False), strict=True):
        assert (one - two).norm() <= 1e-8 * two.norm()
        assert (one - three).norm() > 0.1 * one.norm()


@pytest.mark.parametrize("config", [{"rule": "deeptransformer"}, {"rule": "swdt"}, {"block": "attention"}])
def test_an_anchored_cache_of_states_that_grow(config):
    net, ids = model(**config), torch.randint(0, 256, (2, 12))
    cache, kept = (
        AtlasCache(net.config.num_hidden_layers, straight_through=straight_through)
        for straight_through in (True, False)
    )
    for _ in range(3):
        ours, theirs = (net(input_ids=ids, labels=ids, past_key_values=c).loss for c in (cache, kept))
        torch.testing.assert_close(ours, theirs)
    ours.backward()
    initial = [p.grad for name, p in net.named_parameters() if ".initial." in name]
    assert all(g is not None and g.norm() > 0 for g in initial) and bool(initial) == ("rule" in config)


def test_hidden_states_of_packed_rows():
    net = model(rule="titans")
    ids, starts = torch.randint(0, 256, (1, 12)), torch.zeros(1, 12)
    starts[0, 5] = 1
    hidden = net(input_ids=ids, document_starts=starts, output_hidden_states=True).hidden_states
    second = net(input_ids=ids[:, 5:], output_hidden_states=True).hidden_states
    for whole, part in zip(hidden, second, strict=True):
        assert error(whole[:, 5:], part) < 1e-8


def test_cuts_go_where_a_layer_is():
    """accelerate's hooks bring what they can to the device of the layer that they are about to call."""
    starts, x = torch.tensor([[1, 0, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0]]), torch.randn(2, 6, 4)
    cuts = PackedRows.from_starts(starts, x, torch.nn.Identity())
    moved = send_to_device(cuts, "meta", non_blocking=True)
    tensors = [t for g in moved.groups for t in (g.index, g.real, g.row, g.continues) if t is not None]
    assert all(t.is_meta for t in (*tensors, moved.last)) and moved.shape == cuts.shape
    back = cuts.to("cpu")
    assert torch.equal(back.pack([g.unpack(x) for g in back.groups]), x)
    with pytest.raises(ValueError, match=r"mask has shape \[1, 6\] but the tokens are .* \[2, 6\]"):
        PackedRows.from_starts(starts, x, torch.nn.Identity(), torch.ones(1, 6))
