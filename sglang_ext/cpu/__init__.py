"""SGLang on a CPU with the stock wheel and plain torch: no sgl_kernel, no Triton, no graphs."""
