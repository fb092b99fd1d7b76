"""What is said of an exception of user code."""

import dataclasses

import pytest

from raypar.user_code.user_code_errors import error_text


@dataclasses.dataclass
class Output:
    logits: int = 1
    loss: int = 2


class Awkward:
    def __dir__(self) -> list[str]:
        raise RuntimeError


@pytest.mark.parametrize(
    "obj, name, end",
    [
        (Output(), "logit", "has no attribute 'logit' (did you mean 'logits'?)"),
        (Output(), "hidden_states", "has no attribute 'hidden_states'"),
        (Awkward(), "logit", "has no attribute 'logit'"),
    ],
)
def test_a_misspelt_attribute_is_told_with_the_one_that_was_meant(obj, name, end):
    with pytest.raises(AttributeError) as caught:
        getattr(obj, name)
    assert error_text(caught.value).endswith(end)


def test_an_attribute_error_that_names_no_attribute_is_told_as_it_is():
    assert error_text(AttributeError("no such thing")) == "AttributeError: no such thing"
