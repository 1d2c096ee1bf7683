"""Lets each Python of a test, Ray's workers too, find the stand-in GPU when it imports torch."""

import os

if os.environ.get("STANDIN_LIBRARY"):
    import standin

    standin.hook()
