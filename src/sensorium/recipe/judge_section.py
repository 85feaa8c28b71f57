"""The section ``judges`` of a recipe: models that judge what the policy wrote, and where they are reached.

A recipe never holds a key: it names an environment variable or a file that does.
"""

from pathlib import Path
from typing import Literal, Self
from urllib.parse import SplitResult, urlsplit

from pydantic import Field, model_validator

from sensorium.recipe.section import Section
from sensorium.vocabulary.secrets import holds_key


class JudgeEndpointSection(Section):
    """Where a model is reached: ``base_url`` of an OpenAI-compatible server, or ``azure_endpoint`` with ``api_version``."""

    base_url: str = Field(default="", description="of an OpenAI-compatible server, with its /v1")
    azure_endpoint: str = Field(default="", description="of an Azure resource, instead of base_url")
    api_version: str = Field(default="", description="of Azure's API; needed with azure_endpoint")
    model: str = Field(default="", description="the model's name there (Azure: deployment); empty: as judges call it")
    api_key_env: str = Field(default="", description="environment variable that holds the key; empty: none is sent")
    api_key_file: Path | None = Field(default=None, description="file that holds the key alone, instead of api_key_env")

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if bool(self.base_url) == bool(self.azure_endpoint):
            raise ValueError("an endpoint has either base_url or azure_endpoint")
        address = urlsplit(self.base_url or self.azure_endpoint)
        if holds_key(self.base_url or self.azure_endpoint):  # errors and the log of calls show addresses, too
            raise ValueError("an endpoint whose address holds no key, user or query (api_key_env names the key)")
        if self.azure_endpoint and not self.api_version:
            raise ValueError("azure_endpoint needs api_version")
        if self.api_key_env and self.api_key_file:
            raise ValueError("an endpoint has api_key_env or api_key_file, not both")
        if address.scheme not in ("http", "https") or not address.hostname or not _port_fits(address):
            raise ValueError("an endpoint has an address such as http://127.0.0.1:8000/v1")
        return self


def _port_fits(address: SplitResult) -> bool:
    try:
        return address.port != 0
    except ValueError:
        return False


class PriceSection(Section):
    """What a model costs, for the metrics."""

    input: float = Field(default=0.0, ge=0, description="for a million tokens that it reads")
    output: float = Field(default=0.0, ge=0, description="for a million tokens that it writes")


class JudgesSection(Section):
    """Models that judge, by name; a judge term says which one it asks. Judgements are cached by content; docs/judges.md."""

    config: Path | None = Field(
        default=None,
        description="JSON file of endpoints by model name; default: the file M3_API_CONFIG names; without it, and without "
        "endpoints, configs/api_config.json",
    )
    endpoints: dict[str, tuple[JudgeEndpointSection, ...]] = Field(
        default={}, description="endpoints by model name; they come before those of config"
    )
    fallbacks: dict[str, tuple[str, ...]] = Field(default={}, description="models to ask, in turn, where one cannot answer")
    cache: Path | None = Field(
        default=None, description="SQLite file that runs may share; default: judges.sqlite of the run"
    )
    offline: bool = Field(default=False, description="answer from the cache alone; what it lacks ends the run")
    deadline_s: float = Field(default=60.0, gt=0, description="for one call of an endpoint")
    total_deadline_s: float = Field(default=300.0, gt=0, description="for one judgement, with all its calls and waits")
    retries: int = Field(
        default=5, ge=0, description="calls made again for one judgement: no answer, or HTTP 408, 429, 5xx"
    )
    malformed_retries: int = Field(default=2, ge=0, description="calls made again where an answer is not in its form")
    concurrency: int = Field(default=32, ge=1, le=1024, description="calls at once, of all models")
    requests_per_minute: dict[str, float] = Field(default={}, description="by model; shared by all processes of a run")
    tokens_per_minute: dict[str, float] = Field(default={}, description="by model, read and written; shared likewise")
    limits: Path | None = Field(
        default=None, description="SQLite file of these limits, for runs that share them; default: one of the run"
    )
    prices: dict[str, PriceSection] = Field(default={}, description="what models cost, by name; for judge/MODEL/cost")
    structured: Literal["auto", "never"] = Field(
        default="auto", description="auto: send the JSON schema of the answer along, and stop where an endpoint refuses it"
    )
