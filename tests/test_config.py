"""What `Settings` promises: LMCache's names and files as they stand, one precedence, nothing quietly ignored."""

import json
import os
import pickle
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from lmc.config.lmcache import ALIASES, FEATURES, NESTED, feature_of, ignored
from lmc.config.redis_url import parse_redis_url
from lmc.config.remote_url import parse_remote_url
from lmc.config.settings import Settings
from lmc.config.sources import OF_SERVICES, REMOVED, RENAMED, shown
from lmc.errors import ConfigError, LmcError
from lmc.http.address import admin_token
from lmc.rag import SEPARATOR

DATA = Path(__file__).parent / "data"
CONFIGURATIONS = yaml.safe_load((DATA / "lmcache_configurations.yaml").read_text())
THEIR_SETTINGS = yaml.safe_load((DATA / "lmcache_settings.yaml").read_text())

PUBLISHED = json.loads((Path(__file__).parent / "data" / "cacheblend.json").read_text())


def from_yaml(tmp_path: Path, text: str, **environ: str) -> Settings:
    file = tmp_path / "lmc.yaml"
    file.write_text(text)
    return Settings.load(environ={"LMC_CONFIG_FILE": str(file), **environ})


def refusal(overrides: Mapping[str, object] | None = None, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        Settings.load(overrides, environ=environ)
    return str(caught.value)


def test_the_list_of_settings_is_frozen() -> None:
    assert list(Settings.model_fields) == [
        "chunk_size",
        "save_decode_cache",
        "server",
        "max_local_cpu_size",
        "max_local_device_size",
        "local_disk",
        "max_local_disk_size",
        "remote_url",
        "remote_serde",
        "remote_deadline",
        "remote_ttl",
        "remote_prefix",
        "encryption_key",
        "document_share",
        "max_document_index_size",
        "load_policy",
        "load_deadline",
        "enable_blending",
        "blend_special_str",
        "blend_method",
        "blend_recompute_ratios",
        "blend_min_tokens",
        "blend_learn",
        "blend_find",
        "blend_min_run",
        "admin",
        "admin_token",
        "document_events",
    ]


class TestDefaults:
    def test_nothing_given_means_the_defaults(self) -> None:
        settings = Settings.load(environ={})
        assert settings.model_dump() == Settings().model_dump()
        assert {settings.origin(name) for name in Settings.model_fields} == {"default"}

    def test_the_published_defaults_are_ours(self) -> None:
        assert Settings(**PUBLISHED["defaults"]).model_dump() == Settings().model_dump()

    def test_a_settings_value_cannot_be_changed(self) -> None:
        with pytest.raises(ValidationError):
            Settings().chunk_size = 16

    def test_settings_travel_to_other_processes_with_their_origins(self) -> None:
        settings = pickle.loads(pickle.dumps(Settings.load({"lmc.chunk_size": 16}, environ={})))
        assert (settings.chunk_size, settings.origin("chunk_size")) == (16, "override lmc.chunk_size")


class TestPublishedCacheBlend:
    def test_its_environment_is_accepted_as_it_stands(self) -> None:
        settings = Settings.load(environ=PUBLISHED["environment_as_published"])
        assert settings.enable_blending
        assert settings.blend_special_str == " # # "
        assert settings.blend_recompute_ratios == 0.15
        assert settings.origin("enable_blending") == "environment LMCACHE_ENABLE_BLENDING"

    def test_its_yaml_is_accepted_as_it_stands(self, tmp_path: Path) -> None:
        settings = from_yaml(tmp_path, PUBLISHED["yaml_as_published"])
        assert settings.enable_blending
        assert settings.blend_special_str == " # # "
        assert settings.origin("blend_recompute_ratios") == f"YAML {tmp_path}/lmc.yaml"


class TestPrecedence:
    def test_overrides_beat_lmc_variables_beat_lmcache_variables_beat_yaml_beat_defaults(self, tmp_path: Path) -> None:
        file = tmp_path / "x.yaml"
        file.write_text("chunk_size: 1\nblend_min_tokens: 1\nmax_local_cpu_size: 1\nmax_local_disk_size: 1")
        environ = {
            "LMC_CONFIG_FILE": str(file),
            "LMCACHE_CHUNK_SIZE": "2",
            "LMCACHE_BLEND_MIN_TOKENS": "2",
            "LMCACHE_MAX_LOCAL_CPU_SIZE": "2",
            "LMC_CHUNK_SIZE": "3",
            "LMC_BLEND_MIN_TOKENS": "3",
        }
        settings = Settings.load({"chunk_size": 4}, environ=environ)
        effective = {name: (getattr(settings, name), settings.origin(name)) for name in Settings.model_fields}
        assert effective["chunk_size"] == (4, "override chunk_size")
        assert effective["blend_min_tokens"] == (3, "environment LMC_BLEND_MIN_TOKENS")
        assert effective["max_local_cpu_size"] == (2.0, "environment LMCACHE_MAX_LOCAL_CPU_SIZE")
        assert effective["max_local_disk_size"] == (1.0, f"YAML {file}")
        assert effective["remote_serde"] == ("none", "default")

    def test_the_order_of_variables_in_the_environment_does_not_matter(self) -> None:
        both = {"LMC_CHUNK_SIZE": "3", "LMCACHE_CHUNK_SIZE": "2"}
        assert Settings.load(environ=both).chunk_size == 3
        assert Settings.load(environ=dict(reversed(both.items()))).chunk_size == 3

    def test_a_bad_value_that_a_later_source_replaces_does_no_harm(self) -> None:
        assert Settings.load({"chunk_size": 64}, environ={"LMC_CHUNK_SIZE": "many"}).chunk_size == 64

    @pytest.mark.parametrize("key", ["chunk_size", "lmc.chunk_size", "lmcache.chunk_size"])
    def test_override_keys_may_have_a_prefix(self, key: str) -> None:
        settings = Settings.load({key: 16}, environ={})
        assert (settings.chunk_size, settings.origin("chunk_size")) == (16, f"override {key}")

    def test_one_setting_twice_in_the_overrides_is_an_error(self) -> None:
        said = refusal({"lmc.chunk_size": 16, "lmcache.chunk_size": 32})
        assert "chunk_size = 16 (override lmc.chunk_size)" in said
        assert "32 (override lmcache.chunk_size)" in said

    def test_arguments_are_validated_alike_and_read_no_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LMC_CHUNK_SIZE", "64")
        assert Settings().chunk_size == 256
        assert Settings(chunk_size="32").origin("chunk_size") == "argument chunk_size"
        assert Settings.load().chunk_size == 64

    def test_other_programs_variables_are_none_of_our_business(self) -> None:
        environ = {"PATH": "/bin", "LMCX_CHUNK_SIZE": "1", "VLLM_LMC_X": "1"}
        assert Settings.load(environ=environ).chunk_size == 256

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("LMC_LOG_LEVEL", "1"),
            ("LMC_ROUTER_PORT", "1"),
            *(("LMC_KERNELS", kernels) for kernels in ("", "auto", "triton", "torch")),
            *(("LMC_CHECK_INTEGRITY", switch) for switch in ("", "true", "TRUE", "1", "yes", "on", "0", "Off")),
        ],
    )
    def test_variables_of_other_parts_of_lmc_are_no_settings(self, name: str, value: str) -> None:
        assert Settings.load(environ={name: value}).model_dump() == Settings().model_dump()

    @pytest.mark.parametrize(
        ("name", "value", "valid"),
        [
            ("LMC_KERNELS", "tritn", "auto, triton, torch"),
            ("LMC_KERNELS", "Torch", "auto, triton, torch"),
            ("LMC_CHECK_INTEGRITY", "maybe", "true or false"),
        ],
    )
    def test_a_wrong_value_of_a_variable_of_another_part_is_refused(self, name: str, value: str, valid: str) -> None:
        said = refusal(None, **{name: value, "LMC_CHUNK_SIZE": "0"})
        assert f"invalid {name} = {value}: use " in said
        assert valid in said
        assert "chunk_size = '0'" in said, "all errors at once"

    @pytest.mark.parametrize(("name", "meant"), [("LMC_LOG_LEVELS", "LMC_LOG_LEVEL"), ("LMC_KERNEL", "LMC_KERNELS")])
    def test_a_misspelt_variable_of_another_part_of_lmc_is_refused(self, name: str, meant: str) -> None:
        assert f"unknown setting {name} (environment {name}): did you mean {meant}?" in refusal(None, **{name: "1"})

    @pytest.mark.parametrize("key", ["USE_EXPERIMENTAL", "TRACK_USAGE"])
    def test_lmcaches_variables_about_itself_are_ignored(self, key: str, caplog: pytest.LogCaptureFixture) -> None:
        assert Settings.load(environ={f"LMCACHE_{key}": "True"}).chunk_size == 256
        assert not caplog.records


class TestYaml:
    def test_an_empty_file_sets_nothing(self, tmp_path: Path) -> None:
        assert from_yaml(tmp_path, "# nothing\n").model_dump() == Settings().model_dump()

    def test_lmc_config_file_is_read_instead_of_lmcaches(self, tmp_path: Path) -> None:
        ours, theirs = tmp_path / "a.yaml", tmp_path / "b.yaml"
        ours.write_text("chunk_size: 16")
        theirs.write_text("chunk_size: 32")
        both = {"LMCACHE_CONFIG_FILE": str(theirs), "LMC_CONFIG_FILE": str(ours)}
        assert Settings.load(environ=both).chunk_size == 16
        assert Settings.load(environ={"LMCACHE_CONFIG_FILE": str(theirs)}).chunk_size == 32

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("- 1\n- 2", "holds a list; it must be a mapping"),
            ("chunk_size", "holds a str; it must be a mapping"),
            ("chunk_size: [1", "in line 1, column 15"),
            ("chunk_size: 2024-99-99", "is not YAML"),
            ("[" * 5_000, "is not YAML"),
            ("chunk_size:", "chunk_size = None (YAML"),
            ("chunk_sizes: 1", "did you mean chunk_size?"),
            ("1: 2", "unknown setting 1 (YAML"),
        ],
    )
    def test_a_file_that_cannot_be_right_is_refused_with_its_name(self, tmp_path: Path, text: str, said: str) -> None:
        with pytest.raises(ConfigError) as caught:
            from_yaml(tmp_path, text)
        assert f"YAML {tmp_path}/lmc.yaml" in str(caught.value)
        assert said in str(caught.value)

    def test_a_setting_that_stands_twice_is_refused_with_its_lines(self, tmp_path: Path) -> None:
        """The last one won silently."""
        with pytest.raises(
            ConfigError, match=r"lmc\.yaml .* has chunk_size twice, in lines 1 and 3: leave one"
        ) as caught:
            from_yaml(tmp_path, "chunk_size: 64\nremote_url: redis://:hunter2@a\nchunk_size: 128")
        assert "hunter2" not in str(caught.value)
        with pytest.raises(ConfigError, match="has s3_region twice, in lines 2 and 3"):
            from_yaml(tmp_path, "extra_config:\n  s3_region: a\n  s3_region: b")
        with pytest.raises(ConfigError, match="has s3_region twice, in lines 1 and 1"):
            from_yaml(tmp_path, "extra_config: {s3_region: a, s3_region: b}")
        with pytest.raises(ConfigError, match=r"extra_config \(YAML .*\) has password twice"):
            from_yaml(tmp_path, "extra_config: |\n  password: a\n  password: b")
        text = "chunk_size: 64\nextra_config: {s3_region: a, more: {s3_region: b}}"
        assert from_yaml(tmp_path, text).chunk_size == 64, "another mapping may have the same key"

    def test_bytes_that_are_no_text_are_refused(self, tmp_path: Path) -> None:
        file = tmp_path / "x.yaml"
        file.write_bytes(b"\xff\xfe\xfa")
        assert "is not YAML" in refusal(LMC_CONFIG_FILE=str(file))

    def test_a_missing_file_is_an_error_and_not_no_settings(self, tmp_path: Path) -> None:
        said = refusal(LMCACHE_CONFIG_FILE=str(tmp_path / "gone.yaml"))
        assert said.startswith(f"YAML {tmp_path}/gone.yaml (from LMCACHE_CONFIG_FILE) cannot be read: No such file")

    def test_a_broken_line_is_not_quoted_for_it_may_hold_a_password(self, tmp_path: Path) -> None:
        file = tmp_path / "x.yaml"
        file.write_text("remote_url: [redis://:hunter2@host")
        assert "hunter2" not in refusal(LMC_CONFIG_FILE=str(file))


class TestValues:
    @pytest.mark.parametrize("written", [0.2, "0.2", [0.2], (0.2,), "[0.2]", " [ 0.2 ] "])
    def test_the_ratio_may_stand_in_a_list_of_one(self, written: object) -> None:
        assert Settings(blend_recompute_ratios=written).blend_recompute_ratios == 0.2

    @pytest.mark.parametrize(
        ("written", "path"),
        [("file:///kv/a/", "/kv/a"), ("/kv/a", "/kv/a"), (Path("/kv"), "/kv"), ("file://kv/a/", "kv/a")],
    )
    def test_a_directory_is_a_path_or_a_file_url(self, written: object, path: str) -> None:
        assert Settings(local_disk=written).local_disk == Path(path)

    @pytest.mark.parametrize(("given", "seconds"), [("7d", 604800), ("12h", 43200), ("90s", 90), ("60", 60), (60, 60)])
    def test_a_time_to_live_may_have_a_unit(self, given: object, seconds: int, tmp_path: Path) -> None:
        assert from_yaml(tmp_path, f"remote_ttl: {given}").remote_ttl == seconds
        assert Settings.load(environ={"LMC_REMOTE_TTL": str(given)}).remote_ttl == seconds

    def test_a_tilde_is_the_home_directory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", "/home/someone")
        assert Settings(local_disk="~/kv").local_disk == Path("/home/someone/kv")
        assert Settings(local_disk="file://~/kv").local_disk == Path("/home/someone/kv")

    @pytest.mark.parametrize("name", ["local_disk", "remote_url"])
    @pytest.mark.parametrize("text", ["", "None", "null"])
    def test_an_environment_can_say_not_set(self, name: str, text: str) -> None:
        assert getattr(Settings.load(environ={f"LMC_{name.upper()}": text}), name) is None

    def test_naive_is_another_name_of_the_serde_none(self) -> None:
        assert Settings(remote_serde="naive").remote_serde == "none"

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("chunk_size", 0),
            ("chunk_size", 1.5),
            ("chunk_size", True),
            ("save_decode_cache", "perhaps"),
            ("max_local_cpu_size", 0),
            ("max_local_cpu_size", "inf"),
            ("max_local_cpu_size", "5GB"),
            ("max_local_device_size", -1),
            ("max_local_disk_size", -1),
            ("local_disk", "s3://kv/a"),
            ("local_disk", "file:/kv"),
            ("local_disk", "/kv/a,/kv/b"),
            ("local_disk", "~nobody-by-this-name/kv"),
            ("remote_deadline", 0),
            ("remote_ttl", -1),
            ("remote_ttl", "7w"),
            ("remote_ttl", "-7d"),
            ("remote_prefix", ""),
            ("remote_prefix", "{tenant}"),
            ("remote_serde", "zip"),
            ("load_policy", "sometimes"),
            ("load_policy", "never"),
            ("blend_special_str", ""),
            ("blend_special_str", "   "),
            ("blend_method", "Query"),
            ("blend_method", "deviation"),
            ("blend_method", None),
            ("blend_recompute_ratios", 1.01),
            ("blend_recompute_ratios", -0.1),
            ("blend_recompute_ratios", "nan"),
            ("blend_recompute_ratios", [0.2, 0.1]),
            ("blend_recompute_ratios", "0.2,0.1"),
            ("blend_recompute_ratios", [True]),
            ("blend_recompute_ratios", []),
            ("blend_min_tokens", -1),
            ("blend_learn", None),
        ],
    )
    def test_a_bad_value_is_refused_with_key_value_origin_and_remedy(self, name: str, value: object) -> None:
        said = refusal({f"lmcache.{name}": value})
        assert said.startswith(f"{name} = {shown(name, value)} (override lmcache.{name}) must be ")
        assert said.endswith(str(Settings.model_fields[name].description))
        with pytest.raises(ConfigError) as caught:
            Settings(**{name: value})
        assert f"(argument {name}) must be " in str(caught.value)

    def test_a_config_error_is_one_of_lmcs_errors_and_a_value_error(self) -> None:
        with pytest.raises(LmcError) as caught:
            Settings(chunk_size=0)
        assert isinstance(caught.value, ValueError)

    @pytest.mark.parametrize(
        "url",
        [
            "redis://:hunter2@",
            "redis://:hunter2@host:port",
            "redis://:hunter2@host:0",
            "redis://:hunter2@host/db",
            "redis://:hunter2@host/1?db=2",
            "redis://:hunter2@host/1/2",
            "redis://:hunter2@a,b",
            "redis://:hunter2@host?ssl_ca_certs=ca.pem",
            "rediss://:hunter2@host?ssl_cert_reqs=perhaps",
            "rediss://:hunter2@host?hunter2",
            "redis-cluster://:hunter2@a:1,b:2/3",
            "redis-sentinel://:hunter2@a:1,b:2/mymaster/x",
            "unix://hunter2",
            "hunter2",
        ],
    )
    def test_a_bad_remote_url_is_refused_without_showing_its_password(self, url: str) -> None:
        with pytest.raises(ConfigError) as caught:
            Settings(remote_url=url)
        said = str(caught.value)
        assert said.startswith("remote_url = (not shown) (argument remote_url) must be redis://")
        assert "hunter2" not in said
        assert caught.value.__cause__ is None
        assert "hunter2" not in str(caught.value.__context__)

    @pytest.mark.parametrize("server", ["http%3A%2F%2Fu%3Ahunter2%40etcd%3A2379", "http%3a//u:hunter2%40etcd"])
    def test_a_quoted_password_in_a_url_is_masked(self, server: str) -> None:
        url = f"mooncake://master:50051?metadata_server={server}&protocol=tcp"
        text = shown("remote_url", Settings(remote_url=url).remote_url)
        assert "hunter2" not in text
        assert "etcd" in text
        assert "mooncake://master:50051" in text
        assert shown("document_events", "ipc://bucket/a%40b") == "'ipc://bucket/a%40b'", "not a login"

    def test_a_password_in_the_wrong_setting_is_masked(self) -> None:
        said = refusal(LMC_LOCAL_DISK="redis://:hunter2@host")
        assert "local_disk = 'redis://***@host'" in said


class TestCombinations:
    @pytest.mark.parametrize(
        ("given", "pair"),
        [
            ({"local_disk": "/kv", "max_local_disk_size": 0}, ("max_local_disk_size", "local_disk")),
            (
                {"server": "/run/lmc.sock", "max_local_device_size": 1},
                ("max_local_device_size", "server"),
            ),
        ],
    )
    def test_settings_that_cannot_work_together_are_refused_by_name(
        self, given: dict[str, object], pair: tuple[str, str]
    ) -> None:
        with pytest.raises(ConfigError) as caught:
            Settings(**given)
        first, second = str(caught.value).split(" contradicts ")
        assert first.startswith(f"{pair[0]} = ")
        assert second.startswith(f"{pair[1]} = ")


class TestUnknownKeys:
    def test_a_misspelt_key_is_answered_with_a_suggestion(self) -> None:
        assert refusal(LMC_CHNK_SIZE="1") == (
            "unknown setting LMC_CHNK_SIZE (environment LMC_CHNK_SIZE): did you mean LMC_CHUNK_SIZE?"
        )
        assert "did you mean LMCACHE_BLEND_RECOMPUTE_RATIOS?" in refusal(LMCACHE_BLEND_RECOMPUT_RATIOS="1")
        assert "did you mean LMC_CHUNK_SIZE?" in refusal(LMC_chunk_size="1")
        assert "did you mean LMC_ADMIN?" in refusal(LMC_ADMIM="1")
        assert "did you mean local_disk?" in refusal({"lmcache.local_dsk": "/kv"})
        with pytest.raises(ConfigError, match="did you mean chunk_size"):
            Settings(chunksize=1)

    @pytest.mark.parametrize("key", ["sources", "_env_file", "self"])
    def test_no_internal_name_is_a_setting(self, key: str) -> None:
        assert f"unknown setting {key} (override {key})" in refusal({key: "x"})

    def test_the_value_of_an_unknown_key_is_not_shown(self) -> None:
        assert "hunter2" not in refusal(LMC_REDIS_PASSWORD="hunter2")

    @pytest.mark.parametrize("name", ["audit_actual_remote_url", "max_hidden_state_cpu_size", "enable_xpyd"])
    def test_settings_of_another_meaning_are_not_suggested(self, name: str) -> None:
        assert feature_of(name) or ignored(name)

    def test_everything_that_is_wrong_is_said_at_once(self, tmp_path: Path) -> None:
        (tmp_path / "a.yaml").write_text("chnk_size: 1\nlocal_disk: s3://kv\nenable_p2p: true\np2p_host: 10.0.0.1")
        environ = {"LMC_CONFIG_FILE": str(tmp_path / "a.yaml"), "LMC_MAX_LOCAL_CPU_SIZ": "1"}
        said = refusal({"chunk_size": 0}, **environ).splitlines()
        assert len(said) == 5
        for about in ("chnk_size", "LMC_MAX_LOCAL_CPU_SIZ", "chunk_size = 0", "local_disk = 's3://kv'", "P2P"):
            assert sum(about in line for line in said) == 1
        assert "enable_p2p = True, p2p_host = '10.0.0.1'" in next(line for line in said if "P2P" in line)


class TestLMCache:
    @pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.title)
    def test_a_feature_that_lmc_does_not_have_is_refused_if_it_is_on(self, feature, tmp_path: Path, caplog) -> None:
        for switch in feature.switches:
            for said in (refusal({f"lmcache.{switch}": "x"}), refusal(**{f"LMCACHE_{switch.upper()}": "1"})):
                assert feature.title in said
                assert feature.instead in said
                assert switch in said
            with pytest.raises(ConfigError, match=re.escape(f"(YAML {tmp_path}/lmc.yaml)")):
                from_yaml(tmp_path, f"{switch}: true")
            for off in ("false", "null", "''", "0"):
                assert from_yaml(tmp_path, f"{switch}: {off}").model_dump() == Settings().model_dump()
                assert "is not turned on" in caplog.records[-1].getMessage()

    @pytest.mark.parametrize(
        "name",
        [
            "local_cpu",
            "use_layerwise",
            "cache_policy",
            "lookup_timeout_ms",
            "numa_mode",
            "pin_timeout_sec",
            "save_unfull_chunk",
            "blend_check_layers",
            "blend_thresholds",
            "log_level",
            "rpc_port",
            "skip_last_n_tokens",
        ],
    )
    def test_a_setting_that_changes_nothing_is_accepted_with_one_warning(
        self, name: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
    ) -> None:
        for load in (
            lambda: Settings.load({f"lmcache.{name}": "x"}, environ={}),
            lambda: Settings.load(environ={f"LMCACHE_{name.upper()}": "x"}),
            lambda: from_yaml(tmp_path, f"{name}: x"),
            lambda: from_yaml(tmp_path, f"extra_config: {{{name}: x}}"),
            lambda: Settings.load(environ={"LMCACHE_EXTRA_CONFIG": json.dumps({name: "x"})}),
        ):
            assert load().model_dump() == Settings().model_dump()
            (record,) = caplog.records
            assert name in record.getMessage().lower()
            assert str(ignored(name)) in record.getMessage()
            caplog.clear()

    def test_what_production_stack_gives_a_connector_is_ignored_with_reasons(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        extra = {"discard_partial_chunks": False, "lmcache_rpc_port": "producer1", "skip_last_n_tokens": 1}
        settings = Settings.load(extra, environ={"LMCACHE_LOG_LEVEL": "DEBUG"})
        assert settings.model_dump() == Settings().model_dump()
        (record,) = caplog.records
        for name in (*extra, "LMCACHE_LOG_LEVEL"):
            assert name in record.getMessage()
        assert "LMC_LOG_LEVEL" in record.getMessage()

    def test_ignored_settings_share_one_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        Settings.load({"local_cpu": False, "numa_mode": "auto", "extra_config": {"anything": 1}}, environ={})
        assert len(caplog.records) == 1

    def test_settings_of_ours_in_extra_config_count_unless_they_stand_at_the_top(self, tmp_path: Path) -> None:
        assert from_yaml(tmp_path, "extra_config: {chunk_size: 64}").chunk_size == 64
        for text in (
            "chunk_size: 32\nextra_config: {chunk_size: 64}",
            "extra_config: {chunk_size: 64}\nchunk_size: 32",
        ):
            assert from_yaml(tmp_path, text).chunk_size == 32
        assert "must be a mapping" in refusal({"extra_config": [1]})

    @pytest.mark.parametrize(
        ("old", "new"),
        [("max_local_cache_size", "max_local_cpu_size"), ("blend_recompute_ratio", "blend_recompute_ratios")],
    )
    def test_names_of_older_versions_are_understood(self, old: str, new: str, tmp_path: Path) -> None:
        assert getattr(from_yaml(tmp_path, f"{old}: 0.25"), new) == 0.25
        assert "set again" in refusal({old: 1, new: 1})

    @pytest.mark.parametrize("scheme", ["infinistore", "lm", "nixl", "hf3fs"])
    def test_another_store_is_named_by_its_scheme_and_its_url_is_not_shown(self, scheme: str) -> None:
        said = refusal({"remote_url": f"{scheme}://user:hunter2@host:1/kv"})
        are = (
            "Redis (redis://…), Mooncake (mooncake://…), object stores (s3://…, gs://…, az://…) and shared directories"
        )
        assert said.startswith(f"remote_url (override remote_url): {scheme}:// is not supported yet; {are}")
        assert "hunter2" not in said

    @pytest.mark.parametrize(
        ("url", "why"),
        [
            ("gs://user:hunter2@bucket/kv", "credentials do not belong in the URL"),
            ("s3://bucket/kv?secret_access_key=hunter2", "credentials do not belong in the URL"),
            ("s3:///kv", "an object store is written as s3://bucket/prefix"),
            ("gs://one,two/kv", "an object store is written as s3://bucket/prefix"),
            ("file://kv", "a shared directory is written as file:///path"),
            ("file://./kv", "a shared directory is written as file:///path"),
            ("file://relative/kv", "a shared directory is written as file:///path"),
            ("fs://host:0/", "a shared directory is written as file:///path"),
        ],
    )
    def test_what_is_wrong_with_the_url_of_an_object_store_is_said_without_secrets(self, url: str, why: str) -> None:
        said = refusal({"remote_url": url})
        assert said.startswith("remote_url (override remote_url): ")
        assert why in said
        assert "hunter2" not in said

    @pytest.mark.parametrize(
        ("url", "named"),
        [
            ("s3://bucket", "bucket/test/it"),
            ("s3://bucket/", "bucket/test/it"),
            ("s3://bucket/kv", "bucket/kv/test/it"),
            ("s3://bucket/kv?region=x", "bucket/kv/test/it"),
            ("s3://bucket.example.com/kv/", "bucket/kv/test/it"),
        ],
    )
    def test_a_bucket_finds_its_prefix(self, url: str, named: str, caplog: pytest.LogCaptureFixture) -> None:
        given = Settings.load({"remote_url": url, "extra_config": {"s3_file_prefix": "/test/it/"}}, environ={})
        assert str(parse_remote_url(str(given.remote_url))) == f"S3 bucket {named}"
        assert not caplog.records

    def test_a_bucket_finds_its_login_and_its_address(self) -> None:
        more = {
            "aws_access_key_id": "id",
            "aws_secret_access_key": "hunter2/",
            "s3_region": "US-1",
            "disable_tls": True,
        }
        given = Settings.load({"remote_url": "s3://kv.example.com/a", "extra_config": more}, environ={})
        url = parse_remote_url(str(given.remote_url))
        assert (str(url), dict(url.options)) == (
            "S3 bucket kv/a",
            {
                "region": "US-1",
                "endpoint": "http://kv.example.com",
                "virtual_hosted_style_request": "true",
                "access_key_id": "id",
                "secret_access_key": "hunter2/",
            },
        )
        assert "hunter2" not in repr(given) + repr(url) + shown("remote_url", given.remote_url)
        assert Settings.load({"remote_url": "s3://kv/a"}, environ={}).remote_url == "s3://kv/a"

    @pytest.mark.parametrize(
        ("url", "shown"),
        [
            ("s3://bucket/some/prefix?endpoint=http://minio:9000", "S3 bucket bucket/some/prefix"),
            ("gs://bucket", "Google Cloud Storage bucket bucket"),
            ("az://container/kv", "Azure container container/kv"),
            ("abfss://container@account.dfs.core.windows.net/kv", "Azure container container/kv"),
            ("file:///mnt/kv", "shared directory /mnt/kv"),
            ("fs://localhost:0/mnt/kv", "shared directory /mnt/kv"),
        ],
    )
    def test_object_stores_and_shared_directories_are_remote_tiers(self, url: str, shown: str) -> None:
        assert str(parse_remote_url(str(Settings(remote_url=url).remote_url))) == shown

    @pytest.mark.parametrize(
        "url",
        ["redis://user:1234#secret@cache.example:6379", "file:///data/kv#1", "s3://bucket/pre#fix", "mooncake://m#1"],
    )
    def test_a_number_sign_in_a_url_is_refused(self, url: str) -> None:
        """What follows it was dropped: of a password, of a directory, of a prefix."""
        said = refusal({"remote_url": url})
        assert "a # in the URL of a remote tier is written as %23" in said
        assert "secret" not in said

    @pytest.mark.parametrize("more", [{}, {"extra_config": {"protocol": "tcp"}}])
    def test_an_invalid_url_of_a_mooncake_store_is_refused(self, more: dict[str, object]) -> None:
        assert "remote_url (override remote_url): Invalid IPv6 URL" in refusal({"remote_url": "mooncake://[a", **more})

    def test_the_account_of_an_azure_url_is_no_login(self) -> None:
        url = parse_remote_url("abfss://container@account.dfs.core.windows.net/kv")
        assert (url.bucket, url.path, dict(url.options)) == ("container", "kv", {"account_name": "account"})
        assert "credentials do not belong" in refusal({"remote_url": "az://name:password@container/kv"})

    def test_chats_are_built_with_the_separator_that_is_the_default(self) -> None:
        assert Settings().blend_special_str == SEPARATOR

    def test_no_answer_hides_a_setting_of_ours(self) -> None:
        for name in Settings.model_fields:
            assert not feature_of(name)
            assert not ignored(name)

    def test_secrets_are_never_shown(self) -> None:
        said = refusal(
            {"enable_nixl_storage": True, "nixl_backend_params": {"secret_key": "hunter2"}, "nixl_key": "hunter2"}
        )
        assert "enable_nixl_storage = True" in said
        assert "hunter2" not in said

    @pytest.mark.parametrize("entry", CONFIGURATIONS, ids=lambda entry: entry["name"])
    def test_a_published_configuration_starts_or_is_answered_in_one_screen(self, entry, tmp_path: Path, caplog) -> None:
        environ = dict(entry.get("environment", {}))
        if "settings" in entry:
            (tmp_path / "lmcache.yaml").write_text(yaml.safe_dump(entry["settings"]))
            environ["LMCACHE_CONFIG_FILE"] = str(tmp_path / "lmcache.yaml")
        if entry["needs"] == "other" and entry["name"] != "multi-process-environment":
            with pytest.raises(ConfigError) as caught:
                Settings.load(environ=environ)
            lines = str(caught.value).splitlines()
            assert len(lines) <= 5
            assert "unknown setting" not in str(caught.value)
            return
        settings = Settings.load(environ=environ)
        written = entry.get("settings") or {k.removeprefix("LMCACHE_").lower(): v for k, v in environ.items()}
        for name in ("chunk_size", "max_local_cpu_size", "max_local_disk_size", "enable_blending"):
            if name in written:
                assert str(getattr(settings, name)).rstrip("0.") == str(written[name]).rstrip("0.")
        disk = written.get("local_disk") or str(written.get("local_device", "")).partition("file://")[2]
        assert (settings.local_disk is not None) == (bool(disk) and disk != "null")
        login = settings.remote_url and re.search("://(.*)@", settings.remote_url)
        assert bool(login) == any(re.search("password|secret", name) for name in written.get("extra_config") or ())
        remote = written.get("remote_url") or written.get("remote_storage_plugins")
        assert (settings.remote_url is not None) == bool(remote)
        assert len(caplog.records) <= 1

    @pytest.mark.parametrize("setting", THEIR_SETTINGS, ids=lambda setting: setting["name"])
    def test_each_setting_of_lmcache_has_an_answer_of_its_own(self, setting) -> None:
        name = setting["name"]
        known = name in Settings.model_fields or name in ALIASES or name == NESTED
        assert known or feature_of(name) or ignored(name)

    @pytest.mark.parametrize("plugins", [["fs"], "fs", '["fs"]'])
    def test_a_plug_in_for_a_directory_is_a_shared_directory(self, plugins, caplog) -> None:
        more = {"remote_storage_plugin.fs.base_path": "/mnt/a kv", "save_chunk_meta": False}
        given = {"remote_storage_plugins": plugins, "extra_config": more}
        assert list(map(str, Settings.load(given, environ={}).remotes)) == ["shared directory /mnt/a kv"]
        assert "plug" not in caplog.text

    def test_plug_ins_follow_the_remote_url_and_have_settings_by_name(self) -> None:
        more = {
            "remote_storage_plugin.fs.first.base_path": "/mnt/kv",
            "remote_storage_plugin.mooncakestore.master_server_address": "10.0.0.1:50051",
            "remote_storage_plugin.mooncakestore.replica_num": 2,
        }
        given = {"remote_url": "redis://cache", "remote_storage_plugins": ["fs.first", "mooncakestore"]}
        remotes = Settings.load({**given, "extra_config": more}, environ={}).remotes
        assert [remote.place for remote in remotes] == ["redis", "directory", "mooncake"]
        assert (remotes[2].master_address, remotes[2].replica_num) == ("10.0.0.1:50051", 2)

    @pytest.mark.parametrize(
        ("plugins", "more"),
        [
            (["fs"], {}),
            (["fs", "other"], {"remote_storage_plugin.fs.base_path": "/mnt/kv"}),
            (["fs"], {"remote_storage_plugin.fs.base_path": "/mnt/a,/mnt/b"}),
            (["fs.first"], {"remote_storage_plugin.fs.base_path": "/mnt/kv"}),
        ],
    )
    def test_other_plug_ins_are_refused(self, plugins, more) -> None:
        said = refusal({"remote_storage_plugins": plugins, "extra_config": more})
        assert "lmc does not have plug-ins" in said

    def test_a_valkey_finds_its_login_and_its_nodes(self) -> None:
        more = {"valkey_username": "lmc", "valkey_password": "p@ss", "valkey_database": 3}
        one = Settings.load({"remote_url": "valkey://10.0.0.5:6379", "extra_config": more}, environ={})
        url = parse_redis_url(str(one.remote_url))
        assert (url.kind, url.username, url.password, url.db) == ("single", "lmc", "p@ss", 3)
        two = Settings.load({"remote_url": "resp://a", "extra_config": {"username": "u", "password": "p"}}, environ={})
        url = parse_redis_url(str(two.remote_url))
        assert (url.username, url.password) == ("u", "p")
        nodes = parse_redis_url("valkey://10.0.0.5:6379, 10.0.0.6:6379")
        assert (nodes.kind, [node.host for node in nodes.hosts]) == ("cluster", ["10.0.0.5", "10.0.0.6"])
        for mode, kind in (("cluster", "cluster"), ("standalone", "single")):
            given = {"remote_url": "valkey://10.0.0.5:6379", "extra_config": {"valkey_mode": mode}}
            assert parse_redis_url(str(Settings.load(given, environ={}).remote_url)).kind == kind

    def test_sentinels_without_a_service_have_that_of_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert parse_redis_url("redis-sentinel://a:1,b:2").service == "redismaster"
        monkeypatch.setenv("REDIS_SERVICE_NAME", "cache")
        assert parse_redis_url("redis-sentinel://a:1,b:2").service == "cache"
        assert parse_redis_url("redis-sentinel://a:1,b:2/mymaster").service == "mymaster"

    def test_a_codec_that_loses_precision_is_not_used_and_named(self, caplog) -> None:
        settings = Settings.load({"remote_url": "redis://a", "remote_serde": "cachegen"}, environ={})
        assert settings.remote_serde == "none"
        assert "remote_serde: cachegen (override remote_serde), as it loses precision" in caplog.text


class TestAdministration:
    def test_the_settings_of_administration_may_stand_in_yaml(self, tmp_path: Path) -> None:
        text = "admin: 127.0.0.1:9180\nadmin_token: s3cret\ndocument_events: tcp://*:5558"
        found = from_yaml(tmp_path, text)
        assert (found.admin, found.admin_token, found.document_events) == ("127.0.0.1:9180", "s3cret", "tcp://*:5558")
        assert from_yaml(tmp_path, text, LMC_ADMIN="unix:///a.sock").admin == "unix:///a.sock"

    def test_what_is_empty_is_not_set(self) -> None:
        names = ("LMC_ADMIN", "LMC_ADMIN_TOKEN", "LMC_DOCUMENT_EVENTS")
        assert Settings.load(environ=dict.fromkeys(names, "")).model_dump() == Settings().model_dump()
        assert Settings(admin_token=" s3cret\n").admin_token == "s3cret"

    def test_a_token_that_reads_like_nothing_is_a_token(self) -> None:
        """Otherwise everybody could administer an engine whose operator had set one."""
        assert Settings(admin_token="none").admin_token == "none"

    def test_a_token_of_white_space_is_refused(self) -> None:
        """Otherwise an empty secret file would leave an engine without a token."""
        for token in (" ", "\n", "\t "):
            assert "admin_token = *** (environment LMC_ADMIN_TOKEN) must be" in refusal(LMC_ADMIN_TOKEN=token)

    def test_the_token_is_in_no_text(self, caplog) -> None:
        settings = Settings(admin_token="hunter2")
        texts = [
            repr(settings), str(settings), shown("admin_token", settings.admin_token),
            refusal({"admin_token": ["hunter2"]}), refusal({"lmc.admin_token": "hunter2", "admin_token": "hunter2"}),
            refusal({"chunk_size": 0, "admin_token": "hunter2"}), refusal({"admin_tokem": "hunter2"}),
        ]  # fmt: skip
        assert "admin_token = ***" in texts[3]
        assert "hunter2" not in "".join(texts) + caplog.text

    def test_commands_and_the_router_find_the_token_where_settings_do(self, tmp_path: Path, monkeypatch) -> None:
        """Commands and the router need no other setting for the token, and a wrong setting does not stop them."""
        for name in [name for name in os.environ if name.startswith(("LMC_", "LMCACHE_"))]:
            monkeypatch.delenv(name)
        assert admin_token() == ""
        (tmp_path / "lmc.yaml").write_text("admin_token: of the file\nchunk_size: wrong")
        monkeypatch.setenv("LMC_CONFIG_FILE", str(tmp_path / "lmc.yaml"))
        assert admin_token() == "of the file"
        monkeypatch.setenv("LMC_ADMIN_TOKEN", "of the environment\n")
        assert admin_token() == "of the environment"


def ways(tmp_path: Path, name: str, value: str) -> list[tuple[Callable[[], Settings], str]]:
    """Each way to give a setting, and what it is called as the origin of the value."""
    file, variables = f"YAML {tmp_path / 'lmc.yaml'}", [f"{prefix}_{name.upper()}" for prefix in ("LMC", "LMCACHE")]
    return [
        *((partial(Settings.load, environ={one: value}), f"environment {one}") for one in variables),
        (lambda: Settings.load({f"lmc.{name}": value}, environ={}), f"override lmc.{name}"),
        (lambda: Settings(**{name: value}), f"argument {name}"),
        (lambda: from_yaml(tmp_path, f"{name}: {value}"), file),
        (lambda: from_yaml(tmp_path, f"extra_config: {{{name}: {value}}}"), f"{file}, in extra_config"),
    ]


class TestRemovedSettings:
    """A setting that lmc had is accepted wherever it may stand, with one line."""

    @pytest.mark.parametrize("name", sorted({name for name in REMOVED if ":" not in name} - RENAMED.keys()))
    def test_one_line_says_that_it_has_no_effect(self, name: str, tmp_path: Path, caplog) -> None:
        for load, origin in ways(tmp_path, name, "x"):
            caplog.clear()
            assert load().model_dump() == Settings().model_dump()
            (record,) = caplog.records
            assert record.getMessage().startswith(f"{name} ({origin}) has no effect any more: ")

    @pytest.mark.parametrize(
        ("name", "value", "method"),
        [
            ("blend_preset", "cacheblend", "cacheblend"),
            ("blend_strategy", "query", "query"),
            ("blend_strategy", "union", "union"),
            ("blend_strategy", "deviation", "cacheblend"),
        ],
    )
    def test_the_preset_and_the_strategy_are_read_as_the_method(
        self, name: str, value: str, method: str, tmp_path: Path, caplog
    ) -> None:
        for load, origin in ways(tmp_path, name, value):
            caplog.clear()
            settings = load()
            assert (settings.blend_method, settings.origin("blend_method")) == (method, origin)
            (record,) = caplog.records
            assert record.getMessage().startswith(f"{name} ({origin}) is read as blend_method")

    @pytest.mark.parametrize("name", RENAMED)
    @pytest.mark.parametrize("value", ["random", "all", "none", "epic"])
    def test_what_is_no_method_is_refused_with_the_methods(self, name: str, value: str) -> None:
        said = refusal({name: value})
        assert said == f"blend_method = '{value}' (override {name}) must be union, query, head or cacheblend"

    def test_an_earlier_name_beside_the_present_one_is_refused(self) -> None:
        assert "blend_method = 'union' (override blend_method) is set again, to 'query' (override blend_strategy)" in (
            refusal({"blend_method": "union", "blend_strategy": "query"})
        )

    def test_the_codec_lz4_is_read_as_planes(self, tmp_path: Path, caplog) -> None:
        assert from_yaml(tmp_path, "remote_serde: lz4").remote_serde == "planes"
        (record,) = caplog.records
        assert record.getMessage().startswith(f"remote_serde: lz4 (YAML {tmp_path / 'lmc.yaml'}) is read as planes")

    def test_it_is_said_once_if_it_stands_in_several_places(self, caplog) -> None:
        Settings.load({"store_policy": "write_back"}, environ={"LMC_STORE_POLICY": "write_through"})
        (record,) = caplog.records
        assert "override store_policy" in record.getMessage()


class TestKubernetes:
    """In every pod, Kubernetes sets variables for each Service, here for some whose names begin with lmc."""

    def test_variables_of_services_are_no_settings(self) -> None:
        environ = {}
        for service, host in (("LMC", "10.0.0.7"), ("LMC_REDIS_MASTER", "fd00::7"), ("LMCACHE_SERVER", "10.0.0.8")):
            at = f"tcp://[{host}]:80" if ":" in host else f"tcp://{host}:80"
            environ |= {
                f"{service}_SERVICE_HOST": host,
                f"{service}_SERVICE_PORT": "80",
                f"{service}_SERVICE_PORT_HTTP": "80",
                f"{service}_PORT": at,
                f"{service}_PORT_80_TCP": at,
                f"{service}_PORT_80_TCP_PROTO": "tcp",
                f"{service}_PORT_80_TCP_PORT": "80",
                f"{service}_PORT_80_TCP_ADDR": host,
            }
        assert Settings.load(environ=environ).model_dump() == Settings().model_dump()

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("LMC_PORT", "80"),
            ("LMC_SERVICE_HOST", "lmc.example"),
            ("LMC_CHUNK_SERVICE_PORT", "http"),
            ("LMC_PRT", "tcp://10.0.0.7:80"),
        ],
    )
    def test_what_only_looks_like_one_is_refused(self, name: str, value: str) -> None:
        assert f"unknown setting {name}" in refusal(**{name: value})

    def test_a_setting_of_ours_is_never_taken_for_one(self) -> None:
        for name in Settings.model_fields:
            assert not any(re.fullmatch(pattern, f"LMC_{name.upper()}") for pattern in OF_SERVICES)
