"""The exception that a failed start reports as its cause."""

import pytest

from afd_launch.root_cause import RootCause

ENGINE = "(EngineCore pid=812) ERROR 11-23 16:01:02 [core.py:1000] "
API = "(APIServer pid=700) "


def cause(text: str, chunk: int = 7) -> str | None:
    """Returns the cause found in a text that arrives in chunks, as from a pipe."""
    found = RootCause()
    data = text.encode()
    for start in range(0, len(data), chunk):
        found.feed(data[start : start + chunk])
    return found.text


VLLM = f"""\
(EngineCore pid=812) INFO 11-23 16:01:00 [core.py:93] Initializing a V1 LLM engine
{ENGINE}EngineCore failed to start.
{ENGINE}Traceback (most recent call last):
{ENGINE}  File "core.py", line 990, in run_engine_core
{ENGINE}    engine_core = EngineCoreProc(*args)
{ENGINE}ValueError: No available memory for the cache blocks.
(EngineCore pid=812) Process EngineCore:
(EngineCore pid=812) Traceback (most recent call last):
(EngineCore pid=812)   File "process.py", line 314, in _bootstrap
(EngineCore pid=812)     self.run()
(EngineCore pid=812) ValueError: No available memory for the cache blocks.
{API}Traceback (most recent call last):
{API}  File "<frozen runpy>", line 198, in _run_module_as_main
{API}    raise RuntimeError(
{API}RuntimeError: Engine core initialization failed. See root cause above. Failed: {{}}
"""


def test_vllm_reports_the_engines_exception():
    assert cause(VLLM) == "ValueError: No available memory for the cache blocks."


@pytest.mark.parametrize(
    "refers",
    [
        "Exception: WorkerProc initialization failed due to an exception in a background process."
        " See stack trace for root cause.",
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack"
        " trace (above) for the root cause.",
        "RuntimeError: Worker failed with error 'x', please check the stack trace above for the"
        " root cause",
    ],
)
def test_a_workers_exception_is_the_cause_of_its_engines(refers: str):
    trace = 'Traceback (most recent call last):\n  File "a.py", line 1, in b\n'
    assert cause(f"{trace}NameError: name 'fork'\n{trace}{refers}\n") == "NameError: name 'fork'"


@pytest.mark.parametrize("link", ["The above exception was the direct cause of the following",
                                  "During handling of the above"])  # fmt: skip
def test_a_chain_names_the_last_and_the_first_exception(link: str):
    tail = (
        " exception:" if link.endswith("following") else " exception, another exception occurred:"
    )
    text = f"""\
Traceback (most recent call last):
  File "a.py", line 1, in <module>
KeyError: 'model.layers.0'

{link}{tail}

Traceback (most recent call last):
  File "b.py", line 2, in <module>
    raise Broken("cannot load")
a.b.Broken: cannot load
    and a second line
"""
    assert cause(text) == "a.b.Broken: cannot load (caused by KeyError: 'model.layers.0')"


@pytest.mark.parametrize("field", ["", "depth\n", "\ndepth\n"])
def test_pydantic_names_the_fault_behind_its_exception(field: str):
    text = f"""\
Traceback (most recent call last):
  File "a.py", line 1, in <module>
pydantic_core.ValidationError: 1 validation error for VllmConfig
{field}  Value error, no n-grams [type=value_error, input_value=ArgsKwargs(())]
    For further information visit https://errors.pydantic.dev/
"""
    said = ": ".join(
        ["1 validation error for VllmConfig", *field.split(), "Value error, no n-grams"]
    )
    assert cause(text) == f"pydantic_core.ValidationError: {said}"


def test_the_last_failure_counts():
    one = "Traceback (most recent call last):\n  File\nOSError: harmless\nINFO going on\n"
    two = "\x1b[31mTraceback (most recent call last):\x1b[0m\n  File\nMemoryError\n"
    assert cause(one + two) == "MemoryError"
    assert cause(two + "Traceback (most recent call last):\n  File\nSystemExit: 1\n") == (
        "MemoryError"
    )


def test_no_traceback_is_no_cause():
    assert cause("line 1\nValueError: not behind a traceback\n") is None
    assert cause("Traceback (most recent call last):\n  File\n") is None
