"""The copies of the emulated NIC by several threads (comm/tests/fake_copy.h), beside memcpy."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from afd_bench import stand_in_nic

PROGRAM = """
#include "fake_copy.h"
#include <random>
#include <vector>
int main() {
  fake_copy::Team& team = *new fake_copy::Team;
  std::atomic<int> wrong{0}, copied{0};
  std::vector<std::thread> senders;
  for (unsigned sender = 0; sender < 2; ++sender)
    senders.emplace_back([&team, &wrong, &copied, sender] {
      std::mt19937 random(sender);
      for (int round = 0; round < 60; ++round) {
        std::vector<uint8_t> from(random() % 500000), to(from.size()), plain(from.size());
        for (uint8_t& byte : from) byte = static_cast<uint8_t>(random());
        // Busy: the other sender's copy goes on.
        if (!team.copy(to.data(), from.data(), from.size())) continue;
        std::memcpy(plain.data(), from.data(), from.size());
        wrong += to != plain;
        ++copied;
      }
    });
  for (std::thread& sender : senders) sender.join();
  return wrong != 0 || copied < 20;
}
"""


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_copies_by_several_threads_equal_memcpy(tmp_path: Path, sanitizer: str) -> None:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    source, program = tmp_path / "copies.cc", tmp_path / "copies"
    source.write_text(PROGRAM)
    flags = ["-std=c++17", "-O1", "-pthread", f"-fsanitize={sanitizer}"]
    include = f"-I{stand_in_nic.SOURCE.parent}"
    subprocess.run([compiler, *flags, include, source, "-o", program], check=True, timeout=120)
    # A sanitizer has to be the first library. vLLM preloads others in its processes.
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    done = subprocess.run([program], timeout=120, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
