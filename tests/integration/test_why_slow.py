"""`afd ctl why-slow` on real servers: 2A2F, 20 faults at random members, named with their cause.

``AFD_TEST_SEED`` repeats a run; ``AFD_SLOWED_OUT`` names a file for what was measured.
"""

import json
import os
import random
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from machines import why_not
from slowed import CONTROL, MEMBERS, Slowed, deployed, groups_folder

from afd_launch import straggler, top

pytestmark = [pytest.mark.serve, pytest.mark.long]

if (_REASON := why_not()) is not None:
    pytest.skip(_REASON, allow_module_level=True)
if groups_folder() is None:
    pytest.skip("no control groups of processor time can be made", allow_module_level=True)

TIMES = 5
_BEGAN = time.monotonic()
OVER_S = 2.0
FFN = MEMBERS[2:]
WHERE = {"processor": MEMBERS, "wire": MEMBERS, "accelerator": FFN, "imbalance": FFN}
"""Members that a fault can be given: only FFN instances have experts."""


def test_twenty_faults_are_named(tmp_path: Path) -> None:
    seed = os.environ.get("AFD_TEST_SEED", str(random.randrange(10**6)))
    print(f"AFD_TEST_SEED={seed}")
    draw = random.Random(seed)
    cases = [(cause, draw.choice(WHERE[cause])) for cause in WHERE for _ in range(TIMES)]
    draw.shuffle(cases)
    seen = []
    with deployed(tmp_path, draw) as running:
        running.load(8)
        time.sleep(5)
        seen += [look(running, "none", "", "") for _ in range(3)]
        for cause, member in cases:
            with getattr(running, cause)(member) as size:
                time.sleep(1.0)
                seen.append(look(running, cause, member, size))
            if out := os.environ.get("AFD_SLOWED_OUT"):
                Path(out).write_text(json.dumps(seen))
            time.sleep(0.5)
        assert not running.errors, running.errors[:3]
    wrong = [one for one in seen[3:] if one["found"] != [one["member"], one["cause"]]]
    assert not wrong, "\n".join(f"{o['member']} {o['cause']}: {o['says']}" for o in wrong)


def look(running: Slowed, cause: str, member: str, size: str) -> dict[str, object]:
    works, _ = top.observe(CONTROL, running.keys.operator, OVER_S)
    finding = straggler.find([work for work in works if work.stage.count])
    found = [finding.member, finding.cause] if finding else None
    print(
        f"{time.monotonic() - _BEGAN:5.0f} s  {cause:12} {member:12} {size:18} -> {found}",
        flush=True,
    )
    return {
        "cause": cause,
        "member": member,
        "found": found,
        "says": top.explain(works),
        "works": [asdict(work) for work in works],
    }
