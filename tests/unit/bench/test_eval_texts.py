"""Windows count every token once, and the cloze task is a fair and fixed one."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afd.errors import ConfigError
from afd.texts import Text, read_texts, split_documents, spread, windows
from afd_bench.eval import cloze

SHIPPED = Path(__file__).parents[3] / "afd_launch/data/demo/afd-tiny-chat"


@given(st.integers(0, 400), st.integers(2, 70), st.data())
def test_every_token_but_the_first_is_scored_once(
    count: int, size: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, size - 1))
    tokens = list(range(count))
    found = windows(tokens, size, stride)
    assert [t for window in found for t in window.continuation] == tokens[1:]
    for window in found:
        read = [*window.prompt, *window.continuation]
        assert len(read) <= size and window.prompt
        assert read == tokens[read[0] : read[-1] + 1], "a window is one piece of the text"
        assert read[0] == 0 or len(window.prompt) >= size - stride, "with context enough"


def test_a_window_may_not_skip_tokens() -> None:
    with pytest.raises(ValueError, match="a window of 4 tokens cannot move by 4"):
        windows(range(9), 4, 4)
    with pytest.raises(ValueError):
        windows(range(9), 4, 0)


def test_spread_takes_from_everywhere_and_about_as_many_as_asked() -> None:
    all_windows = [w for _ in range(50) for w in windows(range(41), 41, 40)]
    taken = spread(all_windows, 400)
    assert sum(len(w.continuation) for w in taken) == 400
    assert spread(all_windows, 10**6) == all_windows
    assert spread([], 5) == []
    marked = [w for i in range(100) for w in windows([i, i], 2, 1)]
    places = [w.prompt[0] for w in spread(marked, 10)]
    assert places == list(range(places[0], 100, 10))


def test_documents_are_apart_by_dashes() -> None:
    assert split_documents("a\n\nb\n\n---\n\nc\n---\n \n---\n") == ("a\n\nb", "c")
    assert split_documents("a --- b\n--- c") == ("a --- b\n--- c",)
    assert split_documents("\n---\n") == ()


def test_texts_come_from_files_or_lie_beside_the_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"give a text .* with --text FILE"):
        read_texts(tmp_path, [])
    (tmp_path / "heldout.txt").write_text("one\n---\ntwo")
    assert read_texts(tmp_path, []) == [Text("heldout", ("one", "two"))]
    other = tmp_path / "other.txt"
    with pytest.raises(ConfigError, match="cannot read the text"):
        read_texts(tmp_path, [other])
    other.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot read the text"):
        read_texts(tmp_path, [other])
    other.write_text(" \n")
    with pytest.raises(ConfigError, match="is empty"):
        read_texts(tmp_path, [other])


def documents(count: int) -> list[str]:
    draw = random.Random(0)
    return [" ".join(f"w{draw.randrange(999)}" for _ in range(30)) for _ in range(count)]


def test_cloze_offers_the_true_ending_once_among_other_passages() -> None:
    texts = documents(20)
    found = cloze.items(texts, 12)
    assert len(found) == 12
    assert found == cloze.items(texts, 12) != cloze.items(texts, 12, seed=2)
    endings = {" " + " ".join(t.split()[16:20]) for t in texts}
    whole = {" ".join(t.split()[:20]) for t in texts}
    for item in found:
        assert len(set(item.options)) == len(item.options) == cloze.OPTIONS
        assert set(item.options) <= endings
        *shots, context = item.context.split("\n\n")
        assert len(shots) == cloze.SHOTS and set(shots) <= whole
        fitting = [o for o in item.options if context + o in whole]
        assert fitting == [item.options[item.answer]]
        assert context + fitting[0] not in shots, "the answer is not shown"
    assert len({item.answer for item in found}) > 1, "the place says nothing"


def test_a_text_with_few_passages_has_no_cloze() -> None:
    assert cloze.items(documents(5), 10) == []
    assert cloze.items(["too short"], 10) == []
    assert len(cloze.items(documents(6), 10)) == 4
    assert cloze.items([documents(1)[0]] * 9, 10) == [], "nine times the same passage"


def test_cloze_leaves_out_markup() -> None:
    (plain,) = documents(1)
    for markup in ("<|im_start|>user ", '{"a": ', "`x` "):
        assert cloze.passages([markup + plain]) == []
    assert len(cloze.passages([plain, plain])) == 1


def test_the_likeliest_option_is_chosen_and_the_first_of_equals() -> None:
    assert cloze.choice([-3.0, -1.0, -2.0]) == 1
    assert cloze.choice([-1.0, -1.0]) == 0


def test_the_shipped_texts_make_a_task() -> None:
    texts = read_texts(SHIPPED, [])
    assert [text.name for text in texts] == ["heldout-chat", "heldout"]
    for text in texts:
        assert len(cloze.items(text.documents, 40)) == 40
