"""An engine in another process: tokens over a pipe, weights in a file; nothing but plain data passes between the two."""
