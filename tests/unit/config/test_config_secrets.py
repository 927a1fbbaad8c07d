"""Passwords, tokens and keys are refused wherever a configuration would write them down, and ordinary settings are not."""

from pathlib import Path

import pytest

from dist_transformer.config.credentials import holds_secret, is_secret, without_credentials
from dist_transformer.config.loading import load_config
from dist_transformer.errors import ConfigError

NAMES = [
    "PGPASSWORD",
    "MYSQL_PWD",
    "REDISCLI_AUTH",
    "SSHPASS",
    "DB_PASS",
    "SMTP_PASS",
    "GPG_PASSPHRASE",
    "MLFLOW_TRACKING_PASSWORD",
    "SINGULARITY_DOCKER_PASSWORD",
    "DOCKER_AUTH_CONFIG",
    "AZURE_STORAGE_KEY",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_CLIENT_SECRET",
    "AZURE_STORAGE_CONNECTION_STRING",
    "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_DEVOPS_EXT_PAT",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_ACCESS_KEY_ID",
    "AWS_SESSION_TOKEN",
    "GOOGLE_API_KEY",
    "OPENAI_KEY",
    "OPENAI_API_KEY",
    "ANTHROPIC_AUTH_TOKEN",
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "GITHUB_PAT",
    "GH_TOKEN",
    "WANDB_API_KEY",
    "wandb_api_key",
    "COMET_API_KEY",
    "NEPTUNE_API_TOKEN",
    "MLFLOW_TRACKING_TOKEN",
    "DATABRICKS_TOKEN",
    "NGC_APIKEY",
    "KAGGLE_KEY",
    "SLACK_WEBHOOK_URL",
    "SENTRY_DSN",
    "SSH_PRIVATE_KEY",
    "ENCRYPTION_KEY",
    "MYTOKEN",
    "accessToken",
]
HARMLESS = {
    "TOKENIZERS_PARALLELISM": "false", "HF_HOME": "/scratch/hf", "KEYBOARD": "de", "MAX_TOKENS": "4096", "max_tokens": "99999",
    "TOKEN_BUDGET": "8192", "OMP_NUM_THREADS": "8", "NCCL_SOCKET_IFNAME": "ib0", "PATH": "/opt/bin:/bin", "OLDPWD": "/home/a",
    "HF_TOKEN_PATH": "/home/a/token", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1", "SSH_AUTH_SOCK": "/tmp/ssh", "AUTHOR": "Ann Lee",
    "GOOGLE_APPLICATION_CREDENTIALS": "/home/a/key.json", "AWS_SHARED_CREDENTIALS_FILE": "/home/a/aws", "MONKEY": "island",
    "SSH_KEY": "~/.ssh/id_ed25519", "MLFLOW_TRACKING_URI": "http://login01:5000", "HTTPS_PROXY": "http://proxy:3128",
    "DATABASE_URL": "sqlite:///a@b.db", "SECRETARY": "Ann Lee", "COMPASS": "north", "PGPASSFILE": "pgpass.conf",
}  # fmt: skip
TOKENS = [
    "ghp_pa55word0123456789ab",
    "github_pat_pa55word0123456789ab",
    "glpat-pa55word0123456789ab",
    "hf_pa55word0123456789ab",
    "sk-pa55word0123456789ab",
    "sk-proj-pa55word_0123-456789ab",
    "xoxb-0123456789-pa55word",
    "AKIA55WORD0123456789",
    "AIza_pa55word0123456789012345678901",
]
TEXTS = [
    "https://someone:pa55word@mlflow.example.org",
    "postgresql+psycopg2://someone:pa55word@db/mlflow",
    "docker://someone:pa55word@registry.example.org/image",
    "https://host/data?access_token=pa55word",
    "https://host/data?a=1&private_token=pa55word",
    "https://pa55word@sentry.example.org/1 SENTRY_DSN=pa55word",
    "export TOKEN=pa55word",
    "module load cuda; export OMP_NUM_THREADS=8 HF_TOKEN='pa55word'",
    'export MLFLOW_TRACKING_PASSWORD="pa55word"',
    "setenv API_KEY pa55word",
    "wandb login --api-key pa55word",
    "login --user me --password=pa55word",
    "--export=ALL,PGPASSWORD=pa55word",
    "--export=OPENAI_KEY=pa55word,A=1",
    "AccountName=a;AccountKey=pa55word==;EndpointSuffix=core.windows.net",
    "curl -H 'Authorization: Bearer pa55word'",
    *TOKENS,
    "export HF_TOKEN=${HF_TOKEN:-hf_pa55word0123456789ab}",
]
ORDINARY = [
    "module load cuda/12.4",
    "source ~/secrets.sh",
    "export HF_TOKEN=$(cat ~/.token)",
    'export HF_TOKEN="$MY_TOKEN" OMP_NUM_THREADS=8',
    "export WANDB_API_KEY=`cat ~/.wandb`",
    "export PGPASSWORD=${PGPASSWORD}",
    "read -r TOKEN < ~/.token",
    "curl https://me:$PASSWORD@host/data",
    'curl -H "Authorization: Bearer $TOKEN" https://host',
    "pip install git+ssh://git@github.com/a/b",
    "conda activate sk-learn-environment-of-2026",
    "sort --key=2 hosts",
    "unset HF_TOKEN",
    "export SSH_KEY=~/.ssh/id PATH=/opt/bin:$PATH",
    "echo Basic configuration",
    "--mpi=pmix",
    "--container-mounts=/a:/b",
    "https://host/corpus.tsv?key=train.tsv",
    "s3://bucket/x",
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("run: {name: test}\ndata:\n  train: {demo: train}\n", encoding="utf-8")
    return path


def problem_of(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, list(overrides))
    [problem] = caught.value.problems
    return problem


@pytest.mark.parametrize("name", NAMES)
def test_a_variable_of_a_secrets_name_is_refused_and_not_printed(path, name):
    problem = problem_of(path, f"slurm.environment.{name}=pa55word")
    assert f"slurm.environment.{name}: looks like a secret" in problem
    assert (
        "`export` it in the shell that calls train or submit: the job inherits it, also when it is requeued" in problem
    )
    assert "55word" not in problem


@pytest.mark.parametrize(("name", "value"), HARMLESS.items())
def test_an_ordinary_variable_is_taken(path, name, value):
    assert not is_secret(name, value)
    assert load_config(path, [f"slurm.environment.{name}='{value}'"]).slurm.environment == {name: value}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("key", ["environment", "setup", "srun", "sbatch", "container_image"])
def test_a_secret_in_a_value_is_refused_and_not_printed(path, key, text):
    written = text.replace("'", "''")
    mapping = f"{{ADDRESS: '{written}'}}"
    value = {"setup": f"['{written}']", "container_image": f"'{written}'"}.get(key, mapping)
    path.write_text(path.read_text() + f"slurm:\n  {key}: {value}\n", encoding="utf-8")
    problem = problem_of(path)
    assert f"slurm.{key}" in problem
    assert "run.yaml:5:" in problem
    assert "looks like a secret" in problem
    assert "55word" not in problem


@pytest.mark.parametrize("text", ORDINARY)
@pytest.mark.parametrize("key", ["setup", "srun.export"])
def test_an_ordinary_line_or_option_is_taken_also_one_that_fetches_a_secret(path, key, text):
    written = text.replace("'", "''")
    assert load_config(path, [f"slurm.{key}=['{written}']"])


@pytest.mark.parametrize(
    "override",
    [
        "slurm.setup=export TOKEN=pa55word",
        "slurm.setup=[{TOKEN: pa55word}]",
        "slurm.extra_srun=--export=PGPASSWORD=pa55word",
        "slurm.srun.export={PGPASSWORD: pa55word}",
        "slurm={setup: ['export TOKEN=pa55word']}",
        "slurm.nodes=hf_pa55word0123456789ab",
        "slurm.setup:['export TOKEN=pa55word']",
    ],
)
def test_no_message_about_another_mistake_repeats_a_secret(path, override):
    assert "55word" not in problem_of(path, override)


@pytest.mark.parametrize(
    "key", ["data.train.path", "data.root", "data.train.hub", "training.init_from", "validation.plugin", "tracking.uri"]
)
@pytest.mark.parametrize("text", ["https://host/x?access_token=pa55word", "https://host/hf_pa55word0123456789ab/x"])
def test_an_address_with_a_token_is_refused_in_every_section(path, key, text):
    found = [problem for problem in _problems(path, f"{key}={text}") if "holds a " in problem]
    assert [problem.split(": ")[2] for problem in found] == [key]
    assert "55word" not in "".join(found)


def _problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, list(overrides))
    return caught.value.problems


@pytest.mark.parametrize("text", TOKENS)
def test_a_known_token_is_taken_out_of_what_is_written(text):
    assert without_credentials(f"before {text}, after") == "before ***, after"
    assert holds_secret(f"before {text}, after")
