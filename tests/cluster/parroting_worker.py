"""A worker that says what it is asked. ``python -m tests.cluster.parroting_worker FD``"""

from sensorium.workers.placed_main import serve

if __name__ == "__main__":
    serve(lambda settings, folder: ("parrot", lambda question: question))
