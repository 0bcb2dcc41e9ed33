"""Compute threads and cores while the other side waits."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from afd.host.lent_cores_torch import LentCores


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_threads_and_mask_follow_the_turn():
    own, other = sorted(os.sched_getaffinity(0))[:2]

    def work():
        cores = LentCores((own,), (other,))
        for turn in (True, True, False, True, False):
            cores.use(lent=turn)
            wanted = {own, other} if turn else {own}
            assert os.sched_getaffinity(0) == wanted
            assert torch.get_num_threads() == len(wanted)

    before = torch.get_num_threads()
    with ThreadPoolExecutor(1) as pool:  # the mask is that of a thread
        pool.submit(work).result()
    torch.set_num_threads(before)


def test_without_lent_cores_nothing_changes():
    mask, threads = os.sched_getaffinity(0), torch.get_num_threads()
    LentCores((0,), ()).use(lent=True)
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == (mask, threads)
