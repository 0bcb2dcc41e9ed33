"""`afd bench report`: numbers come from records, and only from records."""

from dataclasses import replace
from pathlib import Path

import pytest

from afd.errors import AfdError
from afd.records import Record, read_records, write_records
from afd_bench.report import command, pages, readme
from afd_bench.report.sources import Checkout

ROOT = Path(__file__).parents[3]
RECORD = Record(
    bench="cpu", case="batch 32", metric="tokens_per_s", value=757.0, unit="tokens/s",
    peer="vllm", peer_value=1054.0, ratio=0.72, machine="2 cores", command="afd bench cpu",
    commit="abc1234", date="2026-11-22",
)  # fmt: skip
ROW = readme.Row("1A1F on CPU", "cpu.json", "cpu", "batch 32", "tokens_per_s", "vllm")


def test_a_row_shows_its_record():
    text = readme.table([ROW], {"cpu.json": [RECORD]})
    assert "| 1A1F on CPU | 757 tokens/s | vllm: 1,054 tokens/s | 0.72 | 2 cores, abc1234 |" in text


def test_a_row_without_a_record_is_an_error():
    with pytest.raises(AfdError, match=r"no record in docs/results/cpu.json"):
        readme.table([ROW], {"cpu.json": []})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("is 1.5 times as fast", ["1.5 times"]),
        ("a loss of 12 %", ["12 %"]),
        ("takes 273 us", ["273 us"]),
        ("`--port 8000` needs Python 3.11 and 0.4 GiB", []),
        ("```\nready after 19 s\n```", []),
        (f"{readme.BEGIN}\n2 times\n{readme.END}", []),
    ],
)
def test_numbers_outside_of_the_table_are_found(text, found):
    assert readme.unrecorded(text) == found


def test_lost_cells_are_listed_worst_first():
    worse = replace(RECORD, case="batch 1", ratio=0.5)
    won = replace(RECORD, case="batch 64", ratio=1.4)
    text = pages.section("cpu.json", [RECORD, worse, won])
    assert "| tokens_per_s | vllm | 3 | 0.50, 0.72, 1.40 | 2 | 2026-11-22 |" in text
    assert text.index("| batch 1 |") < text.index("| batch 32 |") and "| batch 64 |" not in text


def test_a_section_is_replaced_and_the_reading_stays():
    once = pages.insert("# Title\n\nReading.\n", pages.section("cpu.json", [RECORD]))
    assert once.startswith("# Title\n\nReading.\n")
    assert pages.insert(once, pages.section("cpu.json", [RECORD])) == once


def test_the_age_of_records_is_asked_of_git():
    answers = {"cat-file": "", "diff": "afd/x.py\n"}
    assert Checkout(ROOT, lambda words: answers[words[0]]).changed("cpu", "abc") is True
    assert Checkout(ROOT, lambda words: "").changed("cpu", "abc") is False
    assert Checkout(ROOT, lambda words: None).changed("cpu", "abc") is None
    assert Checkout(ROOT, lambda words: "").changed("cpu", "abc-dirty") is True


def test_a_check_fails_on_a_stale_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(readme, "ROWS", (ROW,))
    results = tmp_path / "docs" / "results"
    results.mkdir(parents=True)
    write_records(results / "cpu.json", [RECORD])
    (results / "cpu.md").write_text("# CPU\n")
    (tmp_path / "README.md").write_text(f"# AFD\n{readme.BEGIN}\n{readme.END}\n")
    assert command.main(["--check", "--root", str(tmp_path)]) == 1
    assert "README.md differs from its records" in capsys.readouterr().out
    assert command.main(["--root", str(tmp_path)]) == 0
    assert command.main(["--check", "--root", str(tmp_path)]) == 0
    write_records(results / "cpu.json", [replace(RECORD, value=800.0)])
    assert command.main(["--check", "--root", str(tmp_path)]) == 1


def test_every_page_of_this_repository_shows_its_records():
    assert command.main(["--check", "--root", str(ROOT)]) == 0


def test_every_benchmark_says_which_code_it_measures():
    from afd_bench.report.sources import CODE_OF

    benches = {
        record.bench
        for path in (ROOT / "docs" / "results").glob("*.json")
        for record in read_records(path)
    }
    assert benches <= set(CODE_OF)
    for paths in CODE_OF.values():
        assert all((ROOT / path).exists() for path in paths)
