"""What one process of the FFN pool is made of before it serves."""

from dataclasses import dataclass, field

from afd.config.resolve import Resolved
from afd.control.client import ControlClient
from afd.host.lent_cores_torch import LentCores
from afd.metrics.role import RoleMetrics
from afd_comm import Region
from ffn_worker.experts.model import FfnModel
from ffn_worker.pool.links import PoolLinks


@dataclass(frozen=True)
class FfnRank:
    """One rank: its configuration, memory, experts, metrics, and its links to others.

    pool: this rank among those of the pool, which it has met. cores: its own, and attention's.
    """

    resolved: Resolved
    region: Region
    control: ControlClient
    model: FfnModel
    pool: PoolLinks
    metrics: RoleMetrics
    cores: LentCores = field(default_factory=LentCores)
