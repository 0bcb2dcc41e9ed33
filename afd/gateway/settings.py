"""What the gateway is told."""

from dataclasses import dataclass

from afd.control.messages import member_id


@dataclass(frozen=True)
class GatewaySettings:
    """Durations are in seconds, sizes in bytes.

    attention_instances / ffn_instances / ffn_tp: what the deployment has when it is complete.
    max_body_bytes: a request body is kept in memory until its answer begins, to be sent again.
    max_json_bytes: a JSON answer up to this size is sent once it is whole; a longer one streams.
    probe_timeout_s: a busy API server may answer /health late, so this is generous, and it takes
        ``probe_misses`` of them in a row before requests go elsewhere.
    abandon_after_s: requests of an instance that is silent for this long are given up.
    max_deliveries: a request that two instances died of is not given to a third.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    attention_instances: int = 1
    ffn_instances: int = 1
    ffn_tp: int = 1
    max_body_bytes: int = 64 * 2**20
    max_json_bytes: int = 16 * 2**20
    connect_timeout_s: float = 5.0
    probe_interval_s: float = 1.0
    probe_timeout_s: float = 5.0
    probe_misses: int = 3
    abandon_after_s: float = 30.0
    scrape_deadline_s: float = 1.0
    drain_s: float = 30.0
    retry_after_s: int = 5
    max_deliveries: int = 2
    instance: str = "gateway-0"
    access_log: bool = False
    metrics: bool = True

    def expected_ids(self) -> tuple[str, ...]:
        """Member ids of the complete deployment."""
        return tuple(f"attention-{i}" for i in range(self.attention_instances)) + tuple(
            member_id("ffn", i, rank)
            for i in range(self.ffn_instances)
            for rank in range(self.ffn_tp)
        )
