"""What requests are made of: models that refuse what they do not know, and errors."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import pydantic
from pydantic import Field

# Most fields of one JSON object. Each unknown field is a fault, and all of them are collected.
MOST_FIELDS = 64

# OpenAI's types of errors.
INVALID = "invalid_request_error"
TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class RequestError(Exception):
    """A request that is answered with an error in OpenAI's form.

    Attributes:
      status: of HTTP; it decides OpenAI's type of the error.
      param: the field that is wrong, or None.
      retry_after: seconds until a client should try again, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after

    def body(self) -> dict[str, Any]:
        """OpenAI's JSON of an error."""
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else INVALID)
        fields = {"type": kind, "param": self.param, "code": self.code}
        return {"error": {"message": " ".join(str(self).split()), **fields}}


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        if len(given) > MOST_FIELDS:
            raise RequestError(f"an object has {len(given):,} fields; give only known ones")
        return {key: value for key, value in given.items() if value is not None}


# A list whose check ends at its first fault: every fault takes a kilobyte.
type Items[Item] = Annotated[list[Item], Field(fail_fast=True)]


def supported(
    given: Any, without: Mapping[str, tuple[Any, ...]], labels: Sequence[str], where: str = ""
) -> Any:
    """An object without fields that have no effect here.

    Args:
      without: fields, with their values that ask for nothing.
      labels: fields that may have any value.
      where: the object's place in the request.

    Raises:
      RequestError: a field asks for what there is not.
    """
    if not isinstance(given, dict):
        return given
    kept = {name: value for name, value in given.items() if name not in labels}
    for name, allowed in without.items():
        value = kept.pop(name, None)
        if value is None or any(
            value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed
        ):
            continue
        shown = " or ".join(json.dumps(each) for each in allowed)
        raise RequestError(
            f"{where}{name} is not supported: leave it out{shown and f', or give {shown}'}",
            param=f"{where}{name}",
            code="unsupported",
        )
    return kept
