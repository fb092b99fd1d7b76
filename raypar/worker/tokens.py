"""The former place of `raypar.data.token_files`, for job files of before; it goes with the next release."""

from raypar.data.token_files import TokenFile, token_loss

__all__ = ["TokenFile", "token_loss"]
