"""The pool of receive buffers: aligned, reused when nobody holds the memory, and ordinary tensors to autograd."""

import torch

from raypar.comm.buffer_pool import BufferPool

SHAPE = (100, 1000)


def test_memory_is_used_again_only_when_no_tensor_and_no_view_holds_it():
    pool = BufferPool()
    first = pool.empty(SHAPE, torch.float32)
    address = first.data_ptr()
    view = first[3:].t()
    del first
    assert pool.empty(SHAPE, torch.float32).data_ptr() != address, "a view holds it"
    del view
    held = pool.held_bytes
    assert pool.empty(SHAPE, torch.float32).data_ptr() == address
    assert pool.held_bytes == held == 2 * 512 * 1024


def test_every_dtype_and_shape_is_aligned_and_contiguous():
    pool = BufferPool()
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex128, torch.int64):
        for shape in ((), (0,), (7,), SHAPE, (33, 1, 2049)):
            tensor = pool.empty(shape, dtype)
            assert tensor.shape == torch.Size(shape) and tensor.dtype == dtype and tensor.is_contiguous()
            assert tensor.numel() == 0 or tensor.data_ptr() % 64 == 0


def test_autograd_sees_a_tensor_of_its_own():
    tensor = BufferPool().empty(SHAPE, torch.float32).fill_(2.0)
    weight = torch.ones(1000, requires_grad=True)
    tensor.mul_(weight)
    tensor.sum().backward()
    assert weight.grad.tolist() == [200.0] * 1000
    leaf = BufferPool().empty(SHAPE, torch.float32).requires_grad_()
    assert leaf.is_leaf and not leaf._is_view()
