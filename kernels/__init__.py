"""One operation a file: the formula, the torch version, and the choice between implementations."""

ROW_PAD = 4  # GEMM rows are padded to a multiple of this: one to three rows get other bits than many do
