"""One operation a file: the formula and the torch version that computes it."""

ROW_PAD = 4  # GEMM rows are padded to a multiple of this: one to three rows get other bits than many do
