"""Gemma 4 text models: libgemma4's logits, tensors, tokens and samples, as numpy arrays.

    import gemma4

    with gemma4.Model("models/austen") as model, gemma4.Tokenizer("models/austen") as tokenizer:
        ids = tokenizer.encode("It is a truth", bos=True)                  # int32 [T]
        with gemma4.State(model) as state:
            logits = state.forward(ids)                                    # float32 [T][V]
        with gemma4.State(model) as state:
            tensors = state.trace(ids)                                     # {"embeddings": [T][D], "layers.0.q": [T][H][dh], ...}
        with gemma4.State(model) as state:
            for text in tokenizer.stream(state.generate(ids, n=40, sampling=model.sampling(seed=10))):
                print(text, end="")

Engine runs many texts at once, with stop strings, prefixes that are computed once and drafts; render_chat and read_answer speak with an
instruction-tuned model.

The numbers are those of the program ./gemma4, bit for bit; the letters of shapes (T, V, D, ...) are those of gemma4.h, and so are the names of
tensors. It computes nothing itself, and it is neither a trainer nor a server.

Errors: what the library refuses raises Error, whose text is the library's one line; an argument of another type TypeError; one of another shape or
size, and an object that is closed, ValueError. A call that raised has changed nothing.

Threads: calls into the library release the GIL. A Model or a Tokenizer may be used by any number of threads at once. A State or an Engine belongs to
one thread at a time; a second one that calls it waits. close() is safe at any time: memory goes when the last call, or the last state of a model, is done with
it, and what is not closed is freed with the object. A process that was forked while OpenMP threads exist cannot use them: open states with
threads=1 there, or start processes by "spawn". A running forward() does not see Ctrl-C until it returns: give long prompts in pieces.

Reading order: models.py, sampling.py, text.py, engine.py, chat.py; base.py is what they share, _c.py what C looks like from here.
"""
from ._c import VERSION as __version__
from .base import Error
from .chat import Answer, ChatPrompt, Message, Part, ToolCall, chat_family, read_answer, recognise_template, render_chat
from .engine import Engine, EngineStats, Event
from .models import Config, LayerConfig, Model, RopeConfig, State, backends
from .sampling import Logprob, Sampling, logprob, sample, top_logprobs
from .text import Decoder, Tokenizer

__all__ = [
    "Answer", "ChatPrompt", "Config", "Decoder", "Engine", "EngineStats", "Error", "Event", "LayerConfig", "Logprob", "Message", "Model", "Part",
    "RopeConfig", "Sampling", "State", "Tokenizer", "ToolCall", "__version__", "backends", "chat_family", "logprob", "read_answer",
    "recognise_template", "render_chat", "sample", "top_logprobs",
]
