"""Opening the tiers that the settings name."""

from pathlib import Path

import pytest

from lmc.config import Settings
from lmc.engine.tiers import open_tiers
from lmc.errors import ConfigError
from lmc.storage import codec
from lmc.storage.disk import UNBOUNDED, DiskTier


def test_a_tier_whose_codec_is_missing_does_not_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It kept the directory locked until it was collected as garbage."""

    def missing() -> None:
        raise ConfigError("no lz4 here")

    monkeypatch.setattr(codec, "_lz4", missing)
    with pytest.raises(ConfigError) as caught:
        open_tiers(Settings(local_disk=tmp_path, local_disk_serde="lz4", max_local_disk_size=0.01), 2)
    DiskTier(tmp_path, UNBOUNDED).close()
    assert "no lz4 here" in str(caught.value)  # The error is still here, and with it whatever its frames hold.
