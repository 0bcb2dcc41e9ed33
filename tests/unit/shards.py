"""Loads whole shards at once, for tests."""

from types import SimpleNamespace

from ffn_worker.experts.loader import Checkpoint, ShardLoader


def load_shard(path, family, model, shard, progress=None, **options):
    """Returns ``layers``, a dict of all layers' weights, and ``bytes_read``."""
    loader = ShardLoader(Checkpoint(path, family, model), shard, **options)
    layers = dict(loader.layers(progress))
    return SimpleNamespace(layers=layers, bytes_read=loader.bytes_read)
