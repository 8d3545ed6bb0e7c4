"""Settings: each source, their order, and errors that name source, key, value and expectation."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from headrace.config.settings import (
    FlagParser,
    Settings,
    SettingsError,
    describe,
    load,
    markdown_table,
    resolve,
)


def one(key: str, argv: list[str], environ: dict[str, str] | None = None) -> object:
    """Return the value of key that a command line and an environment lead to."""
    return getattr(load(argv, environ or {}).settings, key)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Return the path of a settings file that sets the port to 7000."""
    path = tmp_path / "some.toml"
    path.write_text("port = 7000\n")
    return path


def test_without_any_source_every_setting_has_its_default() -> None:
    loaded = load([], {})
    assert loaded.settings == Settings(
        host="127.0.0.1",
        port=8080,
        context=0,
        parallel=0,
        threads=0,
        keep_alive=300.0,
        max_queue=512,
        kv_cache_type="f16",
        origins=(),
        log_level="info",
    )
    assert set(loaded.sources.values()) == {"default"}
    assert set(loaded.sources) == {field.name for field in dataclasses.fields(Settings)}


def test_settings_can_not_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("argv", "key", "value"),
    [
        (["--host", "0.0.0.0"], "host", "0.0.0.0"),
        (["--host", "::"], "host", "::"),
        (["--host=[::1]"], "host", "::1"),
        (["--host", "box.lan"], "host", "box.lan"),
        (["--port", "0"], "port", 0),
        (["--port", "65535"], "port", 65535),
        (["--context", "32768"], "context", 32768),
        (["--parallel", "2"], "parallel", 2),
        (["--threads", "6"], "threads", 6),
        (["--keep-alive", "90"], "keep_alive", 90.0),
        (["--keep-alive", "-1"], "keep_alive", math.inf),
        (["--keep-alive=-1m"], "keep_alive", math.inf),
        (["--keep-alive", "0"], "keep_alive", 0.0),
        (["--max-queue", "1"], "max_queue", 1),
        (["--kv-cache-type", "Q8_0"], "kv_cache_type", "q8_0"),
        (["--origins", "*"], "origins", ("*",)),
        (["--origins", "app://x, https://*.a.org,"], "origins", ("app://x", "https://*.a.org")),
        (["--log-level", "debug"], "log_level", "debug"),
        (["--port", "1", "--port", "2"], "port", 2),
    ],
)
def test_flag_sets_its_field(argv: list[str], key: str, value: object) -> None:
    assert one(key, argv) == value
    assert load(argv, {}).sources[key] == "flag"


@pytest.mark.parametrize(
    ("name", "text", "key", "value"),
    [
        (
            "OLLAMA_ORIGINS",
            "http://a.org,http://b.org:1",
            "origins",
            ("http://a.org", "http://b.org:1"),
        ),
        ("OLLAMA_NUM_PARALLEL", "4", "parallel", 4),
        ("OLLAMA_MAX_QUEUE", "7", "max_queue", 7),
        ("OLLAMA_KEEP_ALIVE", "10m", "keep_alive", 600.0),
        ("OLLAMA_KEEP_ALIVE", "3600", "keep_alive", 3600.0),
        ("OLLAMA_KEEP_ALIVE", "-1", "keep_alive", math.inf),
        ("OLLAMA_CONTEXT_LENGTH", "8192", "context", 8192),
        ("OLLAMA_KV_CACHE_TYPE", "q4_0", "kv_cache_type", "q4_0"),
        ("OLLAMA_KV_CACHE_TYPE", ' "q4_0" ', "kv_cache_type", "q4_0"),
        ("OLLAMA_KV_CACHE_TYPE", "'q4_0'", "kv_cache_type", "q4_0"),
    ],
)
def test_variable_of_ollama_sets_its_field(name: str, text: str, key: str, value: object) -> None:
    loaded = load([], {name: text})
    assert getattr(loaded.settings, key) == value
    assert loaded.sources[key] == f"environment {name}"


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("1.2.3.4", "1.2.3.4", 11434),
        ("1.2.3.4:1234", "1.2.3.4", 1234),
        ("example.com", "example.com", 11434),
        ("example.com:1234", "example.com", 1234),
        ("example.com:1234/path", "example.com", 1234),
        ("example.com/path", "example.com", 11434),
        (":1234", "0.0.0.0", 1234),
        (":0", "0.0.0.0", 0),
        ("http://1.2.3.4", "1.2.3.4", 80),
        ("https://1.2.3.4", "1.2.3.4", 443),
        ("http://1.2.3.4:8000/a/b", "1.2.3.4", 8000),
        ("http://:8000", "0.0.0.0", 8000),
        ("::1", "::1", 11434),
        ("[::1]", "::1", 11434),
        ("[::1]:1337", "::1", 1337),
        ("http://[::1]", "::1", 80),
        ("http://[0:0:0:0:0:0:0:1]:1337/", "::1", 1337),
        (' "1.2.3.4:1" ', "1.2.3.4", 1),
    ],
)
def test_ollama_host_has_all_its_forms(text: str, host: str, port: int) -> None:
    loaded = load([], {"OLLAMA_HOST": text})
    assert (loaded.settings.host, loaded.settings.port) == (host, port)
    assert loaded.sources["host"] == loaded.sources["port"] == "environment OLLAMA_HOST"


@pytest.mark.parametrize(
    "text",
    [
        "h:",
        "h:x",
        "h:65536",
        "h:-1",
        ":",
        "http://",
        "://h",
        "ftp://h",
        "a b",
        "[::1",
        "::1]",
        "1:2:3",
        "[1.2.3.4]:5",
        "/path",
        "h:" + "9" * 5000,
    ],
)
def test_ollama_host_of_no_form_is_an_error(text: str) -> None:
    with pytest.raises(SettingsError, match="environment OLLAMA_HOST: host is") as caught:
        load([], {"OLLAMA_HOST": text})
    assert repr(text) in str(caught.value)
    assert "expected host, host:port, :port or http://host:port" in str(caught.value)


@pytest.mark.parametrize("text", ["", "  ", "''"])
def test_empty_variable_counts_as_not_set(text: str) -> None:
    loaded = load([], {"OLLAMA_HOST": text, "OLLAMA_NUM_PARALLEL": text})
    assert loaded.settings == Settings()
    assert set(loaded.sources.values()) == {"default"}


def test_flag_overrides_one_part_of_ollama_host() -> None:
    loaded = load(["--port", "9"], {"OLLAMA_HOST": "1.2.3.4:5"})
    assert (loaded.settings.host, loaded.settings.port) == ("1.2.3.4", 9)
    assert (loaded.sources["host"], loaded.sources["port"]) == ("environment OLLAMA_HOST", "flag")


def test_file_overrides_the_default(config: Path) -> None:
    loaded = load(["--config", str(config)], {})
    assert (loaded.settings.port, loaded.sources["port"]) == (7000, f"file {config}")
    assert (loaded.settings.host, loaded.sources["host"]) == ("127.0.0.1", "default")


def test_environment_overrides_the_file(config: Path) -> None:
    assert one("port", ["--config", str(config)], {"OLLAMA_HOST": "h:1"}) == 1


def test_flag_overrides_environment_and_file(config: Path) -> None:
    assert one("port", ["--config", str(config), "--port", "2"], {"OLLAMA_HOST": "h:1"}) == 2


def test_file_holds_every_setting_in_the_types_of_toml(tmp_path: Path) -> None:
    path = tmp_path / "all.toml"
    path.write_text(
        'host = "::"\nport = 1\ncontext = 2\nparallel = 3\nmemory = "3GiB"\nvram = "1GiB"\n'
        'mode = "auto"\n'
        "threads = 4\nkeep_alive = -1\n"
        'max_queue = 5\nkv_cache_type = "f32"\nchat_template_file = "t"\n'
        'origins = ["*", "app://x"]\nlog_level = "error"\nmeasure = "never"\n'
    )
    assert load(["--config", str(path)], {}).settings == Settings(
        "::", 1, 2, 3, 3 << 30, 1 << 30, "auto", 4, math.inf, 5, "f32", "t", ("*", "app://x"),
        "error", "never",
    )  # fmt: skip


@pytest.mark.parametrize("variable", ["XDG_CONFIG_HOME", "HOME"])
def test_file_in_the_users_configuration_is_found(tmp_path: Path, variable: str) -> None:
    folder = tmp_path if variable == "XDG_CONFIG_HOME" else tmp_path / ".config"
    path = folder / "headrace" / "config.toml"
    path.parent.mkdir(parents=True)
    path.write_text('keep_alive = "1h"\n')
    loaded = load([], {variable: str(tmp_path)})
    assert (loaded.settings.keep_alive, loaded.sources["keep_alive"]) == (3600.0, f"file {path}")


def test_named_file_replaces_the_one_in_the_users_configuration(
    tmp_path: Path, config: Path
) -> None:
    (tmp_path / "headrace").mkdir()
    (tmp_path / "headrace" / "config.toml").write_text("threads = 3\n")
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert one("threads", [], environ) == 3
    assert one("threads", ["--config", str(config)], environ) == 0


@pytest.mark.parametrize("folder", ["headrace", ".config/headrace"])
def test_file_in_the_working_directory_is_not_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "config.toml").write_text("threads = 3\n")
    monkeypatch.chdir(tmp_path)
    assert load([], {}).settings == Settings()


@pytest.mark.parametrize(
    "environ", [{"XDG_CONFIG_HOME": "relative"}, {"HOME": ""}, {"HOME": "/nowhere/at/all"}]
)
def test_absent_default_file_is_no_error(environ: dict[str, str]) -> None:
    assert load([], environ).settings == Settings()


@pytest.mark.parametrize(
    ("argv", "found", "expected"),
    [
        (["--port", "x"], "flag: port is 'x'", "a whole number from 0 to 65535"),
        (["--port", "65536"], "flag: port is '65536'", "a whole number from 0 to 65535"),
        (["--port=-1"], "flag: port is '-1'", "a whole number from 0 to 65535"),
        (["--port", "1_0"], "flag: port is '1_0'", "a whole number from 0 to 65535"),
        (["--port", ""], "flag: port is ''", "a whole number from 0 to 65535"),
        (["--host", ""], "flag: host is ''", "a host name or an IP address"),
        (["--host", "h:80"], "flag: host is 'h:80'", "a host name or an IP address"),
        (["--host", "http://h"], "flag: host is 'http://h'", "a host name or an IP address"),
        (["--context=-1"], "flag: context is '-1'", "a whole number from 0 to 2147483647"),
        (["--parallel", "129"], "flag: parallel is '129'", "a whole number from 0 to 128"),
        (["--threads", "513"], "flag: threads is '513'", "a whole number from 0 to 512"),
        (["--keep-alive", "abc"], "flag: keep_alive is 'abc'", "a duration such as"),
        (["--kv-cache-type", "f8"], "flag: kv_cache_type is 'f8'", "one of f32, f16, bf16"),
        (["--log-level", "trace"], "flag: log_level is 'trace'", "one of debug, info, warning"),
        (["--origins", "a.org"], "flag: origins is 'a.org'", "scheme://host"),
        (["--origins", "http://a/b"], "flag: origins is 'http://a/b'", "scheme://host"),
    ],
)
def test_bad_flag_value_is_an_error(argv: list[str], found: str, expected: str) -> None:
    with pytest.raises(SettingsError, match="flag: ") as caught:
        load(argv, {})
    assert str(caught.value).startswith(f"{found}, expected ")
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("OLLAMA_NUM_PARALLEL", "parallel"),
        ("OLLAMA_MAX_QUEUE", "max_queue"),
        ("OLLAMA_KEEP_ALIVE", "keep_alive"),
        ("OLLAMA_CONTEXT_LENGTH", "context"),
        ("OLLAMA_KV_CACHE_TYPE", "kv_cache_type"),
        ("OLLAMA_ORIGINS", "origins"),
    ],
)
def test_bad_variable_is_an_error(name: str, key: str) -> None:
    with pytest.raises(SettingsError, match=f"^environment {name}: {key} is 'some', expected "):
        load([], {name: "some"})


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("port = true", "port is True"),
        ("port = 1.5", "port is 1.5"),
        ("keep_alive = false", "keep_alive is False"),
        ("keep_alive = nan", "keep_alive is nan"),
        ("keep_alive = [1]", "keep_alive is [1]"),
        ("host = 1", "host is 1"),
        ("log_level = 1", "log_level is 1"),
        ("origins = 1", "origins is 1"),
        ("origins = [1]", "origins is [1]"),
        ("prot = 1", "unknown key prot = 1"),
        ("[server]\nport = 1", "unknown key server = {'port': 1}"),
    ],
)
def test_bad_line_of_the_file_is_an_error(tmp_path: Path, line: str, found: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(line)
    with pytest.raises(SettingsError, match=", expected ") as caught:
        load(["--config", str(path)], {})
    assert str(caught.value).startswith(f"file {path}: {found}, expected ")


@pytest.mark.parametrize("content", [b"port = = 1", b"\xff\xfe"])
def test_file_that_is_not_toml_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(SettingsError, match=f"^file {path}: .*, expected a TOML file$"):
        load(["--config", str(path)], {})


def test_named_file_that_is_absent_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file or directory, expected a TOML file"):
        load(["--config", str(tmp_path / "absent.toml")], {})


@pytest.mark.parametrize("argv", [["--prot", "1"], ["--por", "1"], ["--port"], ["-x"]])
def test_flag_that_is_unknown_or_has_no_value_is_an_error(argv: list[str]) -> None:
    with pytest.raises(SettingsError, match=f"^flag: .*{argv[0]}.*; some serve --help lists"):
        load(argv, {}, prog="some serve")


def test_command_without_a_settings_flag_has_its_default_whatever_the_environment_says() -> None:
    parser = FlagParser("headrace run", "MODEL")
    parser.add_settings(["context"])
    environ = {"OLLAMA_KV_CACHE_TYPE": "no such type", "OLLAMA_CONTEXT_LENGTH": "7"}
    settings, sources = resolve(vars(parser.parse_args(["--context", "9"])), environ)
    assert (settings.context, settings.kv_cache_type) == (9, "f16")
    assert (sources["context"], sources["kv_cache_type"]) == ("flag", "default")
    with pytest.raises(SettingsError, match="--kv-cache-type"):
        parser.parse_args(["--kv-cache-type", "f32"])


def test_arguments_that_are_no_flags_are_models_wherever_they_stand() -> None:
    loaded = load(["a.gguf", "--port", "1", "b.gguf", "--show-config", "c.gguf"], {})
    assert loaded.models == (Path("a.gguf"), Path("b.gguf"), Path("c.gguf"))
    assert loaded.settings.port == 1


@pytest.mark.parametrize("argv", [[], ["--show-config"]])
def test_show_config_is_asked_for_by_its_flag(argv: list[str]) -> None:
    assert load(argv, {}).show_config == bool(argv)


def test_description_names_value_and_source_of_every_setting() -> None:
    loaded = load(["--keep-alive", "90m", "--origins", "*"], {"OLLAMA_HOST": "h"})
    assert describe(loaded).splitlines() == [
        "host = h (environment OLLAMA_HOST)",
        "port = 11434 (environment OLLAMA_HOST)",
        "context = 0 (default)",
        "parallel = 0 (default)",
        "memory = 0 (default)",
        "vram = none (default)",
        "mode = auto (default)",
        "threads = 0 (default)",
        "keep_alive = 1h30m (flag)",
        "max_queue = 512 (default)",
        "kv_cache_type = f16 (default)",
        "chat_template_file = none (default)",
        "origins = * (flag)",
        "log_level = info (default)",
        "measure = once (default)",
    ]


def test_description_shows_forever_and_none() -> None:
    lines = describe(load(["--keep-alive", "-1"], {})).splitlines()
    assert {"keep_alive = forever (flag)", "origins = none (default)"} <= set(lines)


def test_help_lists_every_flag_with_variable_and_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="0"):
        load(["--help"], {}, prog="some serve")
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.startswith("usage: some serve ")
    assert "(default 127.0.0.1, environment OLLAMA_HOST)" in printed
    for field in dataclasses.fields(Settings):
        assert f"--{field.name.replace('_', '-')} VALUE" in printed
    assert printed.count("(default ") == len(dataclasses.fields(Settings)) + 1  # and --config


def test_readme_table_has_a_row_of_five_cells_for_every_setting() -> None:
    head, rule, *rows = markdown_table().splitlines()
    assert [row.count(" | ") for row in (head, *rows)] == [4] * (1 + len(rows))
    assert rule.count("|") == 6
    names = [row.split("`")[1] for row in rows]
    assert names == [field.name for field in dataclasses.fields(Settings)]
    assert 'comma-separated "\\*"' in markdown_table()  # a bare * would start emphasis
    assert "| `max_queue` | `--max-queue` | `OLLAMA_MAX_QUEUE` | `512` | " in markdown_table()


@pytest.mark.parametrize(("flags", "n_bytes"), [([], None), (["--vram", "0"], 0)])
def test_no_vram_is_not_the_same_as_vram_that_nobody_bounded(
    flags: list[str], n_bytes: int | None
) -> None:
    assert load(flags, {}).settings.vram == n_bytes
