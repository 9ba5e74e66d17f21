"""Where entries are kept, and what signs them. `FsspecStore` and `RedisStore` need the extras of those names when they
are made."""

from .disk import DiskStore
from .distributed_store import DistributedStore
from .fsspec_store import FsspecStore
from .location import own_signing_key
from .redis_store import RedisStore
from .store import EntryStat, MemoryStore, Store
from .tiered import TieredStore

__all__ = ["DiskStore", "DistributedStore", "EntryStat", "FsspecStore", "MemoryStore", "RedisStore", "Store"]
__all__ += ["TieredStore", "own_signing_key"]
