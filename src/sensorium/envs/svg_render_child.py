"""The process that draws SVG: a frame of size and code on standard input, a picture or an error on standard output.

It is run as a script and imports nothing but the renderer. Before the first frame it gives up memory beyond a limit and
the right to open anything: no file and no connection can be opened where no descriptor is left.

    in    side (4 bytes), length (4), code          out    0 or 1 (1 byte), length (4), PNG or the error's words
"""

import os
import resource
import struct
import sys


def main(memory_mib: int) -> None:
    """Answer until standard input closes."""
    import resvg_py

    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (memory_mib << 20, memory_mib << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    requests = sys.stdin.buffer
    while len(head := requests.read(8)) == 8:
        side, length = struct.unpack(">II", head)
        code = requests.read(length).decode()
        try:
            drawn = resvg_py.svg_to_bytes(
                svg_string=code, width=side, height=side, background="white", skip_system_fonts=True
            )
            failed, reply = 0, bytes(drawn)
        except Exception as error:  # whatever the renderer raises is the reply
            failed, reply = 1, str(error).encode("utf-8", "replace")[:1000]
        replies.write(struct.pack(">BI", failed, len(reply)) + reply)


if __name__ == "__main__":
    main(int(sys.argv[1]))
