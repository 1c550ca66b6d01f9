"""Ask about an image: `python describe_image.py ENGINE picture.jpg "What is in this picture?"`."""

import sys

from pop_engine.runtime import Engine, SamplingParams

directory, picture, question = sys.argv[1:]
with Engine.load(directory) as engine:
    messages = [
        {"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": question}]},
    ]
    for piece in engine.stream_chat(messages, SamplingParams(max_tokens=200)):
        print(piece.text, end="", flush=True)
    print()
