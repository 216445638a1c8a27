"""Opening the tiers that the settings name."""

from contextlib import closing
from pathlib import Path

import pytest
import torch
from storage_fakes import DictTier, key_of, meta_of

from lmc.config.settings import Settings
from lmc.errors import ConfigError
from lmc.storage.tiers import codec
from lmc.storage.tiers import opening as tiers
from lmc.storage.tiers.disk import UNBOUNDED, DiskTier
from lmc.storage.tiers.opening import open_tiers
from lmc.storage.tiers.record import encode_header


def test_a_tier_whose_codec_is_missing_does_not_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier, the open disk tier kept its directory locked until the tier was collected as garbage."""

    def missing() -> None:
        raise ConfigError("no lz4 here")

    monkeypatch.setattr(codec, "lz4_block", missing)
    remote = DictTier()
    remote.name, remote.shared = "redis", True
    monkeypatch.setattr(tiers, "open_remote", lambda settings, url: remote)
    given = {"local_disk": tmp_path, "max_local_disk_size": 0.01, "remote_url": "redis://cache"}
    with pytest.raises(ConfigError) as caught:
        open_tiers(Settings(**given, remote_serde="planes"), 2)
    DiskTier(tmp_path, UNBOUNDED).close()
    assert "no lz4 here" in str(caught.value)  # The error is still here, and with it whatever its frames hold.


def test_gigabytes_have_two_to_the_power_of_thirty_bytes(tmp_path: Path) -> None:
    (tier,) = open_tiers(Settings(local_disk=tmp_path, max_local_disk_size=0.25), 2)
    with closing(tier):
        assert tier.inner.capacity == 2**28


@pytest.mark.parametrize(("disk", "said"), [(0.25, 1), (0.5, 0), (1.0, 0)])
def test_a_disk_that_is_smaller_than_memory_is_warned_of_once(
    disk: float, said: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tier,) = open_tiers(Settings(local_disk=tmp_path, max_local_disk_size=disk, max_local_cpu_size=0.5), 2)
    tier.close()
    warned = [record.getMessage() for record in caplog.records if "smaller than" in record.getMessage()]
    text = f"max_local_disk_size ({disk} GB) is smaller than max_local_cpu_size (0.5 GB): a part of what is in memory "
    assert warned == [f"{text}will not be on the disk, and is lost at a restart"] * said


@pytest.mark.parametrize(("given", "smaller"), [({}, False), ({"remote_serde": "planes"}, True)])
def test_records_in_redis_are_encoded_if_the_setting_says_so(
    given: dict[str, str], smaller: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote, meta = DictTier(), meta_of(key_of(0), part_bytes=64 << 10)
    remote.name, remote.shared = "redis", True
    monkeypatch.setattr(tiers, "open_remote", lambda settings, url: remote)
    (tier,) = open_tiers(Settings(remote_url="redis://cache", **given), 2)
    numbers = torch.randn(meta.offset(meta.parts) // 2, generator=torch.Generator().manual_seed(0))
    tier.write(meta, [memoryview(numbers.bfloat16().view(torch.uint8).numpy())])
    kept, whole = len(remote.records[meta.key]), len(encode_header(meta)) + meta.offset(meta.parts)
    assert kept < 0.9 * whole if smaller else kept == whole
