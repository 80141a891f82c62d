"""Segments: every token of every document once an epoch, in order, each row going on where it stopped."""

import numpy as np
import pytest
import torch

from atlas_memory.data import Document, Segments, Tokens, byte_tokenizer


def some_tokens(sizes=(7, 1, 30, 12, 3, 19, 5)) -> Tokens:
    """Documents of so many tokens, 256 first; the others are counted through, so that each token is found again."""
    ids, starts, n = [], [], 0
    for size in sizes:
        starts.append(len(ids))
        ids += [256, *range(1000 + n, 1000 + n + size - 1)]
        n += size
    return Tokens(np.asarray([*ids, 256], np.int32), np.asarray(starts))


def test_documents_begin_with_the_end_of_text() -> None:
    tokens = Tokens.of(byte_tokenizer(), [Document("a", "hi"), Document("b", "é")])
    assert tokens.ids.tolist() == [256, 104, 105, 256, 195, 169, 256]
    assert tokens.starts.tolist() == [0, 3]


def row(segments: Segments, number: int, steps: int) -> dict[str, torch.Tensor]:
    items = [segments[step * segments.rows + number] for step in range(steps)]
    return {name: torch.cat([item[name] for item in items]) for name in items[0]}


@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize("seq_len", [2, 7, 15])
def test_an_epoch_holds_everything_in_order(rows: int, seq_len: int) -> None:
    tokens = some_tokens()
    total = len(tokens.ids) - 1
    part = total // rows
    segments = Segments(tokens, seq_len, rows, 100, seed=3)
    everything = [row(segments, r, -(-part // seq_len)) for r in range(rows)]
    read = torch.cat([r["input_ids"][:part] for r in everything])
    starts = torch.cat([r["document_starts"][:part] for r in everything])
    labels = torch.cat([r["shift_labels"][:part] for r in everything])
    texts = {tuple(d.tolist()) for d in np.split(tokens.ids[:-1], tokens.starts[1:])}
    whole = torch.cat([read, torch.zeros(0, dtype=torch.int64)])
    first = (whole == 256).nonzero()[:, 0].tolist()
    found = [tuple(d.tolist()) for d in torch.tensor_split(whole, first) if len(d)]
    assert set(found[:-1]) <= texts  # the last may be cut off where rows do not divide the text
    assert len(set(whole.tolist())) == len(whole) - (len(first) - 1)
    follows = dict(zip(tokens.ids[:-1].tolist(), tokens.ids[1:].tolist(), strict=True))
    assert all(
        label == follows[token] for token, label in zip(read.tolist(), labels.tolist(), strict=True) if token > 256
    )
    cuts = torch.zeros(len(read), dtype=torch.bool)
    cuts[::part] = True
    assert torch.equal(starts, (read == 256) | cuts[: len(read)])


def test_rows_go_on_through_epochs_in_other_orders() -> None:
    segments = Segments(some_tokens(), 11, 2, 100)
    part = segments.part
    long = row(segments, 1, 30)
    epochs = [long["input_ids"][e * part : (e + 1) * part].tolist() for e in range(4)]
    assert len({tuple(e) for e in epochs}) == 4
    assert all(long["document_starts"][e * part] for e in range(4))
    assert row(Segments(some_tokens(), 11, 2, 5), 1, 5)["input_ids"].tolist() == long["input_ids"][:55].tolist()
    assert Segments(some_tokens(), 11, 2, 5, seed=1)[0]["input_ids"].tolist() != segments[0]["input_ids"].tolist()


def test_lanes_are_further_rows() -> None:
    """Step s reads the rows of lane s % lanes, each a segment further than before."""
    lanes = Segments(some_tokens(), 4, 2, 12, interleave=3)
    wide = Segments(some_tokens(), 4, 6, 4)
    for step in range(12):
        for r in range(2):
            one, two = lanes[step * 2 + r], wide[step // 3 * 6 + step % 3 * 2 + r]
            assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("carry", [None, 3])
def test_rows_go_on_where_they_stood_when_segments_grow(carry: int | None) -> None:
    """After five steps of two lanes, so that half the rows are a segment ahead; then in more lanes of fewer rows."""
    tokens, rows, lanes = some_tokens((90, 70, 300, 51, 8, 77, 200)), 6, 2
    same = Segments(tokens, 4, rows * lanes, 30, reset_every=carry)
    grown = Segments(tokens, 4, rows, 40, interleave=lanes, reset_every=carry, lengths={5: 12, 24: 24})
    assert [grown.times(step) for step in (0, 4, 5, 23, 24, 39)] == [1, 1, 3, 3, 6, 6]
    read: dict[int, list[dict[str, torch.Tensor]]] = {row: [] for row in range(rows * lanes)}
    for step in range(40):
        first, times = next((f, n) for f, n in ((24, 6), (5, 3), (0, 1)) if step >= f)
        for item in range(rows):
            lane = (step - first) % (lanes * times)
            read[lane * (rows // times) + item // times].append(grown[step * rows + item])
    assert [len(items) for items in read.values()] == [27, 27, 24, 24, 18, 18, 17, 17, 17, 17, 17, 17]
    for number, items in read.items():
        whole = row(same, number, len(items))
        assert all(torch.equal(torch.cat([item[name] for item in items]), whole[name]) for name in whole)


def test_passed_states_are_starts_that_are_not_marked() -> None:
    def marks(share: float) -> torch.Tensor:
        return row(Segments(some_tokens((5,) * 40), 20, 1, 10, pass_states=share), 0, 10)["document_starts"]

    assert marks(0).sum() == 40 and marks(1).sum() == 1 and 10 < marks(0.5).sum() < 30


def test_rows_move_on_where_carrying_ends() -> None:
    """Pieces of two segments, rows at different steps; documents begin anywhere in them."""
    tokens = some_tokens((50, 13, 9, 40))
    for r in (0, 1):
        read = row(Segments(tokens, 5, 2, 40, reset_every=2), r, 40)
        ids, labels = read["input_ids"].tolist(), read["shift_labels"].tolist()
        begun = set(read["document_starts"].nonzero()[:, 0].tolist())
        assert set(range(5 * r, 200, 10)) <= begun and {i for i, token in enumerate(ids) if token == 256} <= begun
        assert all(i % 10 == 5 * r or ids[i] == 256 for i in begun)
        follows = dict(zip(tokens.ids[:-1].tolist(), tokens.ids[1:].tolist(), strict=True))
        assert all(label == follows[token] for token, label in zip(ids, labels, strict=True) if token > 256)
    marks = row(Segments(tokens, 5, 1, 40, reset_every=2, pass_states=0.5), 0, 40)["document_starts"].sum()
    assert 3 < marks < 20


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data.seq_len=20 times 4 rows is more than the training text \(77 tokens\)"):
        Segments(some_tokens(), 20, 4, 1)
    with pytest.raises(
        ValueError,
        match=r"the last of data.seq_len_schedule=20 times 4 rows .*: lower the last of data.seq_len_schedule, ",
    ):
        Segments(some_tokens(), 10, 4, 1, lengths={3: 20})
