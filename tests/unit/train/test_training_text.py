"""Corpus cleaning, readers, generated conversations, tokenizer and chat template."""

import struct
import zlib
from random import Random

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from training import tokenizer
from training.calls import tool_conversation
from training.chat import arithmetic
from training.clean import is_prose, normalise
from training.openended import vary
from training.pack import encode, heldout_text, is_heldout
from training.readers import html_text, osis_paragraphs, read_austen, read_sword
from training.sources import SOURCES, WORDNET
from training.stories import story
from training.wordnet import parse_line, split_gloss

PROSE = (
    "The old house stood at the end of the road, and no one had lived in it for many years, "
    "because the people of the village were afraid of it."
)


def test_prose_is_kept_and_code_is_not():
    assert is_prose(PROSE)
    for text in (
        "x = foo(bar_baz) + my_value[3]; return self.thing_of(x) if y else None, and so on then.",
        "Short text.",
        PROSE.rstrip("."),
        "| name | type | default | description | of the table | and | more | cells | to | fill |.",
        "Das alte Haus stand am Ende der Straße, und niemand hatte seit Jahren darin gewohnt.",
    ):
        assert not is_prose(text), text


def test_normalise_gives_plain_quotes_and_one_line():
    assert normalise("“It’s  _very_\n late” — he said…") == '"It\'s very late" - he said...'


def test_html_keeps_paragraphs_and_drops_code_and_menus():
    page = (
        "<html><head><title>Queues &amp; stacks &#8212; Manual</title></head><body><nav>menu</nav>"
        "<p>A <b>queue</b> is &lt;first&gt;.</p><pre>code()</pre><ul><li>One</li></ul></body>"
    )
    document = html_text(page)
    assert document.title == "Queues & stacks"
    assert [p.strip() for p in document.paragraphs] == ["A queue is <first>.", "One"]


def test_sword_blocks_are_read(tmp_path):
    osis = '<div><p>In the <w>beginning</w>.<note n="1">a note</note></p><p>Second.</p></div>'
    packed = zlib.compress(osis.encode())
    (tmp_path / "ot.bzz").write_bytes(packed)
    (tmp_path / "ot.bzs").write_bytes(struct.pack("<III", 0, len(packed), len(osis)))
    for name in ("nt.bzz", "nt.bzs"):
        (tmp_path / name).write_bytes(b"")
    (document,) = read_sword(tmp_path, "")
    kept = [normalise(p) for p in document.paragraphs if p.strip()]
    assert kept == ["In the beginning .", "Second."]
    assert osis_paragraphs("plain &amp; simple") == ["plain & simple"]


def test_r_character_vectors_are_read(tmp_path):
    lines = [f"Line {i}." for i in range(1001)]
    data = b"".join(
        b"\x00\x04\x00\x09" + struct.pack(">i", len(line)) + line.encode() for line in lines
    )
    file = tmp_path / "data.rdb"
    file.write_bytes(struct.pack(">i", len(data)) + zlib.compress(data))
    (document,) = read_austen(file, "")
    assert document.paragraphs == ("\n".join(lines),)


def test_wordnet_lines():
    line = (
        "05 n 02 dog 0 domestic_dog 0 003 @ 02083346 n 0000 ~ 01322604 n 0000 ! 00000009 n 0102 "
        '| a member of the genus Canis; "the dog barked all night"'
    )
    sense = parse_line(f"02084071 {line}")
    assert sense.words == ("dog", "domestic dog")
    assert sense.definition == "a member of the genus Canis"
    assert sense.examples == ("the dog barked all night",)
    assert sense.kinds_of == (("n", "02083346"),) and sense.kinds == (("n", "01322604"),)
    assert sense.opposites == ((0, ("n", "00000009"), 1),)
    assert split_gloss('(law) a rule; another; "an example"') == ("a rule", ("an example",))


def test_stories_are_whole_and_repeatable():
    texts = [story(Random(seed)) for seed in range(200)]
    assert texts == [story(Random(seed)) for seed in range(200)]
    assert len({text for _, text in texts}) == 200
    for subject, text in texts:
        assert "{" not in text and text[-1] in '."' and subject.split()[0] in ("a", "an")


def test_sums_are_right():
    random = Random(1)
    for _ in range(300):
        ask, answer = arithmetic(random)
        numbers = [int(n) for n in answer.rstrip(".").replace("=", " ").split() if n.isdigit()]
        a, b, result = numbers
        operation = {"plus": a + b, "+": a + b, "minus": a - b, "-": a - b, "times": a * b}
        assert result == next(v for k, v in operation.items() if f" {k} " in answer), answer
        assert str(a) in ask and str(b) in ask


def test_variations_keep_most_words():
    random = Random(2)
    asks = {vary(random, "What is a fox?") for _ in range(300)}
    assert {"What is a fox?", "what is a fox"} < asks
    assert all("hat is a fox" in ask for ask in asks)


@pytest.fixture(scope="module")
def small_tokenizer():
    return tokenizer.train([story(Random(seed))[1] for seed in range(100)], 600)


def test_tokenizer_round_trip(small_tokenizer):
    for text in (
        PROSE,
        "12 + 345 = 357",
        "naïve ☃\n\n  tabs\t",
        '<tool_call>\n{"a": 1}\n</tool_call>',
    ):
        assert small_tokenizer.decode(small_tokenizer.encode(text).ids) == text
    digits = small_tokenizer.encode("2026").tokens
    assert digits == ["2", "0", "2", "6"]
    assert [small_tokenizer.token_to_id(t) for t in ("<|endoftext|>", "<|im_end|>")] == [0, 2]


def test_training_renders_chats_as_serving_does(small_tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer.write(small_tokenizer, tmp_path, context=64)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = tokenizer.ChatRenderer()
    messages = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi!"},
    )
    for more in (False, True):
        expected = theirs.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=more
        )
        assert ours(messages, add_generation_prompt=more) == expected
    made, tools = tool_conversation(Random(3))
    expected = theirs.apply_chat_template(made, tools=tools, tokenize=False)
    assert ours(tuple(made), tuple(tools)) == expected
    assert '<tool_call>\n{"name": "' in expected


def test_streams_mark_where_texts_begin(small_tokenizer):
    ids, starts = encode([["One.", "Two."], ["Three."]], small_tokenizer)
    assert list(ids).count(0) == 2 and ids[-1] == 0
    decoded = [small_tokenizer.decode(ids[s : s + 3].tolist())[:2] for s in starts]
    assert decoded == ["On", "Tw", "Th"]


def test_heldout_split_depends_on_the_text_alone():
    texts = [f"document {i}" for i in range(5000)]
    share = sum(map(is_heldout, texts)) / len(texts)
    assert 0.005 < share < 0.015
    assert heldout_text([["a", "b"], ["c" * 100]], 50) == "a\n\nb\n"


def test_every_source_has_a_permissive_licence():
    allowed = ("public domain", "PostgreSQL", "PSF", "BSD", "MIT", "Apache", "WordNet")
    for source in (*SOURCES, WORDNET):
        assert source.licence.startswith(allowed), source
        assert source.version and source.title
