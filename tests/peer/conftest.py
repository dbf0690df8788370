from tests.sharding.conftest import worlds

__all__ = ["worlds"]
