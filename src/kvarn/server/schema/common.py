"""Fields that completions and chat completions share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Texts = Annotated[list[str], Field(fail_fast=True)]  # one error a list is enough, however long it is
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Body(BaseModel):
    """A request's body. An unknown field is refused rather than ignored."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="A last chunk with the usage.")
    continuous_usage_stats: bool | None = Field(None, description="The usage so far in every chunk.")
    include_obfuscation: bool | None = Field(None, description="Accepted; no padding is ever sent.")


class KVChoice(Body):
    """The cache that a request wants. Null: the server's own."""

    format: str | None = Field(
        None, description="KV format, such as bfloat16, or k=NAME,v=NAME: the server's, or one of its --also."
    )
    policy: str | None = Field(None, description="KV policy with its budget, such as h2o:25%; full keeps every token.")
    residual_tokens: int | None = Field(
        None, ge=0, le=2**31 - 1, description="Newest tokens that a further format leaves in full precision."
    )


class StructuredOutputs(Body):
    """Exactly one of these constrains the answer."""

    json_schema: dict[str, Any] | None = Field(None, alias="json", description="A JSON schema.")
    regex: str | None = Field(None, max_length=32_768, description="A regular expression for the whole answer.")
    choice: list[str] | None = Field(None, min_length=1, max_length=1_000, description="One of these texts.")
    grammar: str | None = Field(None, max_length=262_144, description="A grammar in llguidance's Lark form.")


class JsonSchemaFormat(Body):
    name: str | None = Field(None, max_length=256)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: JsonSchemaFormat | None = None
    regex: str | None = Field(None, max_length=32_768)


class Shared(Body):
    """Sampling, streaming and Kvarn's own fields."""

    model: str | None = Field(None, description="One of /v1/models; null: the served one.")
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(1, ge=1, le=128)
    temperature: Finite | None = Field(1.0, ge=0, le=100)
    top_p: Finite | None = Field(1.0, gt=0, le=1)
    presence_penalty: Finite | None = Field(0.0, ge=-100, le=100)
    frequency_penalty: Finite | None = Field(0.0, ge=-100, le=100)
    logit_bias: dict[str, Finite] | None = Field(None, description="Token id -> -100 to 100.")
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: str | Texts | None = Field(None, description="At most 64 texts; the answer ends before one.")
    user: str | None = Field(None, description="Accepted and not used.")
    metadata: dict[str, Any] | None = Field(None, description="Accepted and not used.")
    store: bool | None = Field(None, description="Accepted; nothing is stored.")
    service_tier: str | None = Field(None, description="Accepted and not used.")
    # beyond OpenAI's
    top_k: int | None = Field(0, ge=0, le=2**31 - 1, description="0: off.")
    min_p: Finite | None = Field(0.0, ge=0, le=1)
    repetition_penalty: Finite | None = Field(1.0, gt=0, le=100)
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = False
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None
    priority: int | None = Field(0, ge=-100, le=100, description="Larger goes first.")
    timeout_s: Finite | None = Field(None, gt=0, le=1e6, description="Ends with an error after so long.")
    cache_salt: str | None = Field(None, max_length=256, description="Shares cached prompts only with the same salt.")
    kv: KVChoice | str | None = Field(
        None, description="The cache to use, such as h2o:25% or int8; the answer's `kvarn` field echoes what it got."
    )
    kvarn: bool | None = Field(False, description="Say what the cache and the scheduler did, in the field `kvarn`.")
    return_token_ids: bool | None = Field(False, description="Token ids beside each choice's text.")


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None
    fixes: list[str] = Field(description="What to do about it, cheapest first.")


class ErrorBody(BaseModel):
    error: ErrorDetail


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class KVUsed(BaseModel):
    """format: the one in which tokens end up. bytes: of the blocks held at the end, all answers, shared ones each time;
    bytes_by_format: where they lie. ratio: logical bytes over bytes."""

    cache: str
    format: str
    policy: str
    block_size: int
    bytes: int
    bytes_by_format: dict[str, int]
    logical_bytes: int
    ratio: float | None


class Timings(BaseModel):
    queue_s: float
    prefill_s: float
    ttft_s: float
    decode_s: float


class KvarnReport(BaseModel):
    """One entry a prompt in timings; waits and preemptions in words, in the order in which they came; prefix: for each
    answer, why no more of its prompt was found in the cache."""

    cached_tokens: int
    kv: KVUsed
    waits: list[str]
    preemptions: list[str]
    prefix: list[str | None]
    timings: list[Timings]
