"""Encryption of records: the contract of a tier, and what a store's reader may not learn or change."""

import base64
import json
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from storage_fakes import PARTS, DictTier, content, get, key_of, memory, meta_of, put, raw_record, stored
from tier_contract import OverDict, read, write

from lmc.config.settings import Settings
from lmc.config.sources import shown
from lmc.errors import ChunkLost, ConfigError, CorruptRecord
from lmc.keys import RecordKind, tenant_of
from lmc.open_store import open_store
from lmc.shapes import ALIGN
from lmc.storage import secret_keys
from lmc.storage.chunk_layout import ChunkLayout
from lmc.storage.memory.slab import Slab
from lmc.storage.secret_keys import DIGEST, SALT, TAG, SecretKeys, parse_keys, read_keys
from lmc.storage.store import Store
from lmc.storage.tiers.codec import Coded
from lmc.storage.tiers.disk import DiskTier
from lmc.storage.tiers.encryption import Encrypted, is_encrypted
from lmc.storage.tiers.opening import check_packages
from lmc.storage.tiers.record import HEADER_LIMIT, RecordMeta, decode_header, encode_header, header_size
from lmc.storage.tiers.tier import Tier, Written
from lmc.storage.worker_parts import Parallelism

aead = pytest.importorskip("cryptography.hazmat.primitives.ciphers.aead")
K0, K1, K2 = map(key_of, range(3))
FIRST, SECOND = (base64.b64encode(bytes([number]) * 32).decode() for number in (1, 2))
SECRET_LABEL = "Q2FmZQ== The recipe \udcff.md"


def encrypted(inner: Tier, *lines: str) -> Encrypted:
    """A tier with the keys of a file with these lines, or without keys."""
    return Encrypted(inner, parse_keys(lines) if lines else SecretKeys())


def labelled(key: bytes = K0, tenant: str = "") -> RecordMeta:
    kind, model = RecordKind.DOCUMENT, "llama"
    return replace(meta_of(key), kind=kind, label=SECRET_LABEL, model=model, tenant=tenant_of(tenant))


class TestWithoutKeys(OverDict):
    @pytest.fixture
    def tier(self):
        return encrypted(DictTier())


class TestEncrypted(OverDict):
    @pytest.fixture
    def tier(self):
        return encrypted(DictTier(), FIRST)

    def test_the_kept_bytes_are_a_record_as_the_format_says(self, tier):
        """Decrypted here by the documented format, with no code of lmc but the header's."""
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        tier.write(labelled(), [stored(labelled())])
        blob = self.raw_read(tier, K0)
        start = header_size(blob)
        meta = decode_header(blob[:start])
        assert meta.codec == "aes256gcm"
        assert meta.sizes == ()
        sealed = base64.b64decode(meta.label)
        salt = sealed[DIGEST : DIGEST + SALT]
        cipher = aead.AESGCM(HKDF(SHA256(), 32, salt=salt, info=K0).derive(b"\x01" * 32))
        covered = json.dumps(["llama", "", "none", "document", "00" * 32, 16, 32, PARTS, 4096]).encode()
        label = cipher.decrypt(bytes(12), sealed[DIGEST + SALT :], covered)
        assert label[PARTS * TAG :].decode(errors="surrogatepass") == SECRET_LABEL
        for part in range(PARTS):
            at = start + part * meta.stored_part
            encrypted_part = blob[at : at + meta.stored_part] + label[part * TAG : part * TAG + TAG]
            plain = cipher.decrypt((part + 1).to_bytes(12, "little"), encrypted_part, b"")
            assert plain == content(K0, part)

    def test_nothing_of_a_record_is_in_the_kept_bytes(self, tier):
        tier.write(labelled(), [stored(labelled())])
        blob = self.raw_read(tier, K0)
        assert b"recipe" not in blob
        for part in range(PARTS):
            assert content(K0, part)[:16] not in blob
        assert b"recipe" in raw_record(labelled()), "which would find it"

    def test_no_bytes_are_the_same_in_two_writes(self, tier):
        write(tier, K0)
        first = self.raw_read(tier, K0)
        tier.delete(K0)
        write(tier, K0)
        second = self.raw_read(tier, K0)
        same = sum(one == other for one, other in zip(first[ALIGN:], second[ALIGN:], strict=True))
        assert same < 0.02 * len(first), "about one of 256 is the same by chance"

    def test_the_label_and_the_metadata_come_back(self, tier):
        tier.write(labelled(), [stored(labelled())])
        with closing(tier.open(K0)) as reader:
            assert replace(reader.meta, checksums=()) == labelled()
        assert [replace(meta, checksums=()) for meta, _ in tier.headers()] == [labelled()]

    @pytest.mark.parametrize("changes", [
        {"tokens": 17}, {"first": 0}, {"model": "other"}, {"tenant": "0f"}, {"kind": RecordKind.PAGES},
        {"namespace": b"\x01" * 32}, {"codec": "planes2+lz4+aes256gcm"}, {"label": ""}, {"label": "!"},
        {"label": base64.b64encode(bytes(20)).decode()},
    ])  # fmt: skip
    def test_a_header_that_somebody_has_changed_deletes_the_record(self, tier, changes):
        self.rewrite(tier, labelled(), lambda meta, parts: (replace(meta, **changes), parts))
        with pytest.raises(CorruptRecord):
            tier.open(K0)
        self.assert_gone(tier, K0)

    def test_a_changed_header_has_no_label(self, tier):
        self.rewrite(tier, labelled(), lambda meta, parts: (replace(meta, tokens=17), parts))
        ((meta, _),) = tier.headers()
        assert (meta.key, meta.label) == (K0, "")

    def test_parts_that_somebody_has_exchanged_delete_the_record(self, tier):
        """The checksums are right, as somebody who can write to the store can compute them."""

        def exchange(meta, parts):
            return replace(meta, checksums=(meta.checksums[1], meta.checksums[0], meta.checksums[2])), (
                parts[meta.stored_part : 2 * meta.stored_part]
                + parts[: meta.stored_part]
                + parts[2 * meta.stored_part :]
            )

        self.rewrite(tier, meta_of(K0), exchange)
        with pytest.raises(CorruptRecord):
            read(tier, K0)
        self.assert_gone(tier, K0)

    def test_a_record_that_was_moved_to_another_key_is_deleted(self, tier):
        self.rewrite(tier, labelled(), lambda meta, parts: (replace(meta, key=K1), parts))
        with pytest.raises(CorruptRecord):
            tier.open(K1)
        self.assert_gone(tier, K1)

    def rewrite(self, tier, meta, change):
        """Write a record, and replace it by a changed one with a valid header."""
        tier.write(meta, [stored(meta)])
        blob = self.raw_read(tier, meta.key)
        start = header_size(blob)
        meta, parts = change(decode_header(blob[:start]), blob[start:])
        self.raw_write(tier, meta.key, encode_header(meta) + parts)


class TestKeys:
    def test_an_older_key_still_reads(self):
        inner = DictTier()
        write(encrypted(inner, FIRST), K0)
        tier = encrypted(inner, SECOND, FIRST)
        assert read(tier, K0) == bytes(stored(meta_of(K0)))
        write(tier, K1)
        assert encrypted(inner, FIRST).open(K1) is None, "the first line encrypts"

    @pytest.mark.parametrize("lines", [(), (SECOND,)], ids=["no key", "another key"])
    def test_a_record_whose_key_is_missing_is_a_miss_and_stays(self, lines, caplog):
        inner = DictTier()
        for key in (K0, K1):
            write(encrypted(inner, FIRST), key)
        tier = encrypted(inner, *lines)
        assert tier.contains([K0, K1]) == [True, True], "before they were opened"
        assert tier.open(K0) is None
        assert tier.contains([K0, K1, K2]) == [False, True, False]
        assert [(meta.key, meta.label) for meta, _ in tier.headers()] == [(K0, ""), (K1, "")]
        assert tier.contains([K0, K1, K2]) == [False, False, False]
        assert tier.open(K1) is None
        assert read(encrypted(inner, FIRST), K0) == bytes(stored(meta_of(K0)))
        (said,) = [record.message for record in caplog.records]
        assert "encryption_key has to name all keys in use" in said

    def test_a_newer_key_replaces_a_record_that_it_cannot_read(self):
        inner = DictTier()
        write(encrypted(inner, FIRST), K0)
        tier = encrypted(inner, SECOND)
        tier.open(K0)
        write(tier, K0)
        assert read(tier, K0) == bytes(stored(meta_of(K0)))
        assert tier.contains([K0]) == [True]

    def test_a_process_without_a_key_replaces_nothing(self):
        inner = DictTier()
        write(encrypted(inner, FIRST), K0)
        tier = encrypted(inner)
        tier.open(K0)
        assert tier.write(meta_of(K0), [stored(meta_of(K0))]) is Written.PRESENT
        assert read(encrypted(inner, FIRST), K0) == bytes(stored(meta_of(K0)))

    def test_the_keys_that_are_remembered_as_missing_are_bounded(self, monkeypatch):
        monkeypatch.setattr("lmc.storage.tiers.encryption.UNREADABLE_KEYS", 2)
        inner = DictTier()
        for number in range(5):
            write(encrypted(inner, FIRST), key_of(number))
        tier = encrypted(inner)
        for number in range(5):
            tier.open(key_of(number))
        assert tier.contains([key_of(number) for number in range(5)]) == [True, True, True, True, False]

    def test_each_tenant_has_its_key_and_the_others_the_common_one(self):
        inner = DictTier()
        lines = FIRST, f"acme corp\t{SECOND}"
        for key, tenant in ((K0, ""), (K1, "acme corp"), (K2, "other")):
            encrypted(inner, *lines).write(labelled(key, tenant), [stored(labelled(key, tenant))])
        assert [encrypted(inner, FIRST).open(key) is None for key in (K0, K1, K2)] == [False, True, False]
        assert [encrypted(inner, SECOND).open(key) is None for key in (K0, K1, K2)] == [True, False, True]

    def test_only_tenants_with_a_key_are_encrypted_without_a_common_one(self):
        inner = DictTier()
        for key, tenant in ((K0, ""), (K1, "acme")):
            encrypted(inner, f"acme {FIRST}").write(labelled(key, tenant), [stored(labelled(key, tenant))])
        kept = [decode_header(bytes(inner.records[key])[: header_size(inner.records[key])]) for key in (K0, K1)]
        assert list(map(is_encrypted, kept)) == [False, True]

    @pytest.mark.parametrize("key", [FIRST, "01" * 32, base64.urlsafe_b64encode(b"\xfb" * 32).decode(), f" {FIRST}\n"])
    def test_a_key_may_be_the_value_of_the_setting(self, key):
        assert read_keys(key).newest("") is not None

    def test_a_key_that_begins_like_a_path_is_a_key(self):
        key = base64.b64encode(b"\xff" * 32).decode()
        assert key.startswith("/")
        assert read_keys(key).newest("").secret == b"\xff" * 32

    def test_a_file_may_have_comments(self, tmp_path):
        key_file = tmp_path / "keys"
        key_file.write_text(f"# of 2026\n\n  {FIRST}  \n")
        for path in (str(key_file), f"file://{key_file}"):
            assert read_keys(path).newest("").secret == b"\x01" * 32

    def test_the_example_of_the_documentation_is_a_file_of_keys(self):
        page = (Path(__file__).parent.parent / "docs" / "storage.md").read_text(encoding="utf-8")
        keys = parse_keys(page.split("## Encryption")[1].split("```\n")[2].splitlines())
        assert keys.newest("") is not None
        assert keys.newest(tenant_of("acme")) not in (None, keys.newest(""))

    @pytest.mark.parametrize(("setting", "lines", "said"), [
        ("keys.txt", None, "neither a key of 32 bytes nor an absolute path"),
        ("c2hvcnQ=", None, "neither a key of 32 bytes nor an absolute path"),
        ("/nowhere/keys", None, "cannot read the file that it names: No such file or directory"),
        ("~nobody-of-this-name/keys", None, "neither a key of 32 bytes nor an absolute path"),
        ("/nowhere", None, "cannot read /nowhere: No such file or directory"),
        (None, ["# nothing"], "the file has no key"),
        (None, [FIRST, "acme hunter2"], "line 2 does not end with a key of 32 bytes"),
        (None, [FIRST[:-5]], "line 1 does not end with a key of 32 bytes"),
    ])  # fmt: skip
    def test_what_is_not_a_key_is_refused_and_not_shown(self, setting, lines, said, tmp_path):
        if lines:
            (tmp_path / "keys").write_text("\n".join(lines))
        with pytest.raises(ConfigError, match=said) as refused:
            read_keys(setting or str(tmp_path / "keys"))
        assert "hunter2" not in str(refused.value)
        assert FIRST[:20] not in str(refused.value)

    def test_no_text_shows_a_key(self):
        settings = Settings(encryption_key=FIRST)
        texts = repr(settings), str(settings), shown("encryption_key", FIRST), repr(read_keys(FIRST).newest(""))
        assert FIRST not in "".join(texts)
        assert repr(b"\x01" * 32)[2:-1] not in texts[3]

    def test_a_mistyped_key_that_looks_like_a_path_is_not_shown(self):
        key = base64.b64encode(b"\xff" * 33).decode()
        assert key.startswith("/")
        with pytest.raises(ConfigError) as refused:
            read_keys(key)
        assert key[:20] not in str(refused.value)

    def test_a_key_may_lack_its_padding(self):
        assert read_keys(FIRST.rstrip("=")).newest("").secret == b"\x01" * 32

    def test_a_package_that_is_too_old_is_said(self, monkeypatch):
        """Version 42 was accepted, and then nothing could be stored."""
        monkeypatch.setattr(secret_keys.DerivedKey, "encrypt", Mock(side_effect=ValueError("buffer must be at least")))
        with pytest.raises(ConfigError, match="pip install 'cryptography>=43'"):
            check_packages(Settings(encryption_key=FIRST))

    def test_a_document_whose_label_is_too_long_is_refused(self):
        tier, meta = encrypted(DictTier(), FIRST), replace(labelled(), label="x" * (HEADER_LIMIT * 3 // 4))
        assert tier.write(meta, [stored(meta)]) is Written.REFUSED
        assert tier.contains([K0]) == [False]

    def test_a_missing_package_is_said(self, monkeypatch):
        for name in [name for name in sys.modules if name.split(".")[0] == "cryptography"]:
            monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ConfigError, match="pip install 'cryptography"):
            check_packages(Settings(encryption_key=FIRST))
        check_packages(Settings())

    def test_a_client_of_a_cache_server_has_no_key(self):
        """Otherwise its user would believe that what the server writes is encrypted."""
        with pytest.raises(ConfigError, match="the cache server encrypts; give the key to it alone"):
            Settings(server="/run/lmc.sock", encryption_key=FIRST)


class TestInAStore:
    @pytest.mark.parametrize("place", ["local_disk", "remote_url"])
    def test_every_tier_of_the_settings_is_encrypted(self, place, tmp_path):
        if place == "remote_url":
            pytest.importorskip("obstore")
        given = {place: f"file://{tmp_path}/kept", "max_local_cpu_size": 0.01, "max_local_disk_size": 0.01}
        settings = Settings(encryption_key=FIRST, **given)
        layout = ChunkLayout(Parallelism((PARTS,)), 4096, 2)
        with closing(open_store(settings, layout)) as store:
            assert put(store, K0)
        kept = b"".join(file.read_bytes() for file in (tmp_path / "kept").rglob("*") if file.is_file())
        assert content(K0, 0)[:32] not in kept
        assert b"aes256gcm" in kept
        with closing(open_store(settings, layout)) as store:
            assert get(store, K0) == [content(K0, part) for part in range(PARTS)]
        without = settings.model_copy(update={"encryption_key": None})
        with closing(open_store(without, layout)) as store, pytest.raises(ChunkLost):
            get(store, K0)

    def test_the_directory_has_no_label(self, tmp_path):
        """The index in SQLite has labels as well."""
        with closing(encrypted(DiskTier(tmp_path / "disk", 1 << 20), FIRST)) as tier:
            tier.write(labelled(), [stored(labelled())])
        with closing(encrypted(DiskTier(tmp_path / "disk", 1 << 20), FIRST)) as tier:
            assert [meta.label for meta, _ in tier.headers()] == [SECRET_LABEL]
        for file in (tmp_path / "disk").rglob("*"):
            assert not file.is_file() or b"recipe" not in file.read_bytes()

    def test_a_compressed_record_is_encrypted_afterwards(self):
        meta, inner = replace(meta_of(K0), part_bytes=1 << 14), DictTier()
        parts = memoryview(bytearray(bytes(PARTS << 14)))
        tier = Coded(encrypted(inner, FIRST), "planes", 2)
        tier.write(meta, [parts])
        assert decode_header(bytes(inner.records[K0])[: header_size(inner.records[K0])]).codec == (
            "planes2+lz4+aes256gcm"
        )
        into = memory(PARTS << 14)
        with closing(tier.open(K0)) as reader:
            reader.read(0, PARTS, [into])
        assert bytes(into) == bytes(parts)

    def test_a_store_without_the_key_misses(self):
        inner = DictTier()
        with closing(Store(Slab(4, PARTS, 4096), [Coded(encrypted(inner, FIRST), "none", 2)])) as store:
            put(store, K0)
        with closing(Store(Slab(4, PARTS, 4096), [Coded(encrypted(inner), "none", 2)])) as store:
            with pytest.raises(ChunkLost):
                get(store, K0)
            assert store.lookup([K0]) == [None], "after it was found to be unreadable"

    def test_records_from_before_are_read(self):
        inner = DictTier()
        write(inner, K0)
        assert read(encrypted(inner, FIRST), K0) == bytes(stored(meta_of(K0)))
