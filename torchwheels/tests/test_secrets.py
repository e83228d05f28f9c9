"""No password or token of an address leaves the process: by no message, no log, no report."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT
from forged_wheels import Forge
from torchwheels.system import output

TOKEN = "s'cr%40t-0123@more"
AT = f"me:{TOKEN}@127.0.0.1:9"  # where nobody answers
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
BUILD = (f"--target={PYTHON}-cpu", "--backend=local")
OPTIONS = f"""
[[releases]]
version = "2.99.0"
pythons = ["{PYTHON}"]
index = "https://{AT}/simple"
"""


@pytest.mark.parametrize(
    ("words", "variables", "said"),
    [
        (["build", f"git+https://{AT}/x@v1", *BUILD], {}, "git cannot fetch git+https://****@127"),
        (["build", "--debug", f"git+https://{AT}/x", *BUILD], {}, "git+https://****@127.0.0.1:9/x names no"),
        (["build", f"https://{AT}/x.zip", *BUILD], {}, "there is no https://****@127.0.0.1:9/x"),
        (["build", "x", *BUILD], {"PIP_INDEX_URL": f"http://{AT}/simple"}, "does not answer"),
        (["build", ".", "--debug", *BUILD], {"PIP_INDEX_URL": f"http://{AT}/simple"}, "uv cannot "),
        (["build", ".", *BUILD], {"TORCHWHEELS_TORCH_INDEX": f"http://{AT}/"}, "uv cannot "),
        (["audit", "--config=x.toml"], {}, "1 of 1 wheels are fit to publish"),
        (["index", "--config=x.toml"], {}, "made site with tinyops"),
        (["farm", "index"], {}, "made site of 0 wheels and 0 failures"),
        (["farm", "missing", "--farm=other.toml"], {}, "files is https://****@127.0.0.1:9/{tag}, whose password"),
    ],
)  # fmt: skip
def test_no_token_leaves(
    words: list[str], variables: dict[str, str], said: str, tmp_path: Path
) -> None:
    (tmp_path / "dist").mkdir()
    Forge(tmp_path / "dist").wheel()
    (tmp_path / "x.toml").write_text(OPTIONS)
    farm = 'files = "https://{}/{{tag}}"\nindex = "x"\n[[project]]\nsource = "git+https://{}/x@v1"'
    (tmp_path / "farm.toml").write_text(farm.format("localhost", AT))
    (tmp_path / "other.toml").write_text(farm.format(AT, AT))
    (tmp_path / "setup.py").touch()
    (tmp_path / "pip.conf").touch()
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PIP_")},
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_RETRIES": "0",
        "UV_HTTP_RETRIES": "0",
        "PYTHONPATH": str(ROOT / "torchwheels" / "src"),
        "TORCHWHEELS_CACHE": str(tmp_path / "cache"),
        **variables,
    }
    command = [sys.executable, "-m", "torchwheels", *words]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
    printed = done.stdout + done.stderr
    assert said in printed
    left = [x for x in tmp_path.rglob("*") if x.is_file() and x.suffix != ".toml"]
    for text in (printed.encode(), *(x.read_bytes() for x in left if "cache" not in x.parts)):
        assert not any(part in text for part in (b"s'cr", b"40t-0123", b"me:s", b"more@"))


def test_no_password_of_uv_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many a setup.py prints its environment, and a build may need these."""
    monkeypatch.setenv("UV_INDEX_OWN_PASSWORD", TOKEN)
    monkeypatch.setenv("UV_GITHUB_TOKEN", "secret")
    monkeypatch.setenv("UV_HTTP_TOKEN", "a")
    said = output.masked(
        f"{TOKEN} secret {os.environ['UV_HTTP_TOKEN']} https://{AT}/x https:/{AT}/y"
    )
    assert said == "**** **** a https://****@127.0.0.1:9/x https:/****@127.0.0.1:9/y"


def test_no_token_in_a_query_is_printed() -> None:
    said = "git+https://a/x.git?a=b&private_token=se@cret@v1, https://a/y?X-Amz-Signature=se%40cret&key=%21."
    hidden = "git+https://a/x.git?a=b&private_token=****, https://a/y?X-Amz-Signature=****&key=****"
    assert output.masked(said) == hidden
    said = "https://a/x#token=se, https://a/x?pwd=se https://a?db_passwd=se&sig=se; #egg=x&access_token=se#x"
    assert output.masked(said).count("****") == 5 and "se" not in output.masked(said)
    said = "https://a/x?b=1#egg=x&subdirectory=python"
    assert output.masked(said) == said
