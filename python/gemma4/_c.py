"""Part 1 of gemma4.h in ctypes: the structs, the functions, and where the library is found.

Not for users: what gemma4/__init__.py names is. Nothing is decided here. test/python.py compares every struct, field, constant and function with the header,
by what the C compiler says of them; what is added there is to be added here, in the header's order.
"""
import ctypes
import ctypes.util
import os
import sys
from ctypes import CFUNCTYPE, POINTER, Structure, c_char, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p

VERSION = "0.1.0"  # G4_VERSION, which the library must have too

# fmt: off
CONSTANTS = {
    "G4_F32": 0, "G4_BF16": 1, "G4_Q16": 2,
    "G4_PREFETCH_AUTO": 0, "G4_PREFETCH_NONE": 1, "G4_PREFETCH_HEAD": 2, "G4_PREFETCH_ALL": 3,
    "G4_SLIDING_ATTENTION": 0, "G4_FULL_ATTENTION": 1,
    "G4_PLAIN_TEXT": 1, "G4_SKIP_SPECIAL": 1,
    "G4_RUNNING": 0, "G4_FINISH_STOP_ID": 1, "G4_FINISH_STOP_STRING": 2, "G4_FINISH_LENGTH": 3, "G4_FINISH_CANCELLED": 4, "G4_FINISH_ERROR": 5,
    "G4_CHAT_SMALL": 0, "G4_CHAT_LARGE": 1, "G4_CHAT_PARSE_REQUEST": 1,
    "G4_PART_REASONING": 0, "G4_PART_CONTENT": 1, "G4_PART_TOOL_CALL": 2, "G4_PART_BAD_TOOL_CALL": 3,
}


class g4_error(Structure):
    _fields_ = [("text", c_char * 1024)]


warn_fn = CFUNCTYPE(None, c_void_p, c_char_p)
progress_fn = CFUNCTYPE(None, c_void_p, c_char_p, c_uint64, c_uint64)


class g4_options(Structure):
    _fields_ = [("backend", c_char_p), ("no_mmap", c_int), ("prefetch", c_int), ("warn", warn_fn), ("progress", progress_fn), ("user", c_void_p)]


class g4_layer_config(Structure):
    _fields_ = [("type", c_int), ("head_dim", c_int), ("num_key_value_heads", c_int), ("intermediate_size", c_int), ("kv_layer", c_int)]


class g4_rope_config(Structure):
    _fields_ = [("theta", c_double), ("factor", c_double), ("proportional", c_int), ("partial_rotary_factor", c_double)]


class g4_config(Structure):
    _fields_ = [
        ("model_type", c_char * 32),
        ("vocab_size", c_int), ("vocab_size_per_layer_input", c_int), ("hidden_size", c_int), ("num_hidden_layers", c_int),
        ("num_attention_heads", c_int), ("hidden_size_per_layer_input", c_int), ("sliding_window", c_int), ("max_position_embeddings", c_int),
        ("num_kv_shared_layers", c_int), ("attention_k_eq_v", c_int), ("use_double_wide_mlp", c_int), ("tie_word_embeddings", c_int),
        ("num_experts", c_int), ("top_k_experts", c_int), ("moe_intermediate_size", c_int),
        ("rms_norm_eps", c_float), ("final_logit_softcapping", c_float),
        ("rope", g4_rope_config * 2), ("layers", POINTER(g4_layer_config)),
        ("eos_token_id", c_int32 * 16), ("n_eos", c_int), ("suppress_tokens", c_int32 * 64), ("n_suppress", c_int),
        ("do_sample", c_int), ("top_k", c_int), ("temperature", c_float), ("top_p", c_float),
    ]


class g4_state_options(Structure):
    _fields_ = [("ctx", c_int), ("chunk", c_int), ("n_seqs", c_int), ("threads", c_int), ("precision", c_int)]


class g4_row(Structure):
    _fields_ = [("token", c_int32), ("seq", c_int32), ("pos", c_int32), ("want_logits", c_int32)]


class g4_logit_bias(Structure):
    _fields_ = [("id", c_int32), ("bias", c_float)]


class g4_sampling(Structure):
    _fields_ = [
        ("temperature", c_float), ("top_k", c_int), ("top_p", c_float), ("min_p", c_float), ("repeat_penalty", c_float), ("seed", c_uint64),
        ("frequency_penalty", c_float), ("presence_penalty", c_float), ("n_prompt", c_size_t), ("logit_bias", POINTER(g4_logit_bias)), ("n_logit_bias", c_int),
    ]


class g4_logprob(Structure):
    _fields_ = [("id", c_int32), ("logprob", c_double)]


clock_fn = CFUNCTYPE(c_double)


class g4_engine_options(Structure):
    _fields_ = [("budget", c_int), ("speculate", c_int), ("no_prefix_reuse", c_int), ("clock", clock_fn)]


class g4_request(Structure):
    _fields_ = [
        ("prompt", POINTER(c_int32)), ("n_prompt", c_size_t), ("sampling", g4_sampling), ("max_new", c_int), ("ignore_eos", c_int),
        ("stop_ids", POINTER(c_int32)), ("n_stop_ids", c_int), ("stop", POINTER(c_char_p)), ("n_stop", c_int),
        ("logprobs", c_int), ("top_logprobs", c_int), ("decode_flags", c_int), ("user", c_void_p),
    ]


class g4_event(Structure):
    _fields_ = [
        ("request", c_int64), ("user", c_void_p), ("token", c_int32), ("finish", c_int), ("stop", c_int32), ("text", c_void_p), ("n_text", c_size_t),
        ("logprob", c_double), ("top", POINTER(g4_logprob)), ("n_top", c_int), ("n_prompt", c_int), ("n_cached", c_int), ("n_new", c_int), ("error", c_char_p),
    ]


class g4_engine_stats(Structure):
    _fields_ = [
        ("waiting", c_int), ("active", c_int), ("forwards", c_uint64), ("rows", c_uint64), ("prompt_tokens", c_uint64), ("cached_tokens", c_uint64),
        ("new_tokens", c_uint64), ("proposed", c_uint64), ("accepted", c_uint64),
        ("prompt_seconds", c_double), ("decode_seconds", c_double), ("sampling_seconds", c_double),
    ]


class g4_chat_marker(Structure):
    _fields_ = [("at", c_size_t), ("n", c_size_t)]


class g4_chat_prompt(Structure):
    _fields_ = [
        ("text", c_void_p), ("n", c_size_t), ("markers", POINTER(g4_chat_marker)), ("n_markers", c_size_t),
        ("in_reasoning", c_int), ("n_media", c_uint32), ("n_unknown", c_uint32),
    ]


class g4_part(Structure):
    _fields_ = [("kind", c_int), ("text", c_void_p), ("name", c_void_p), ("n", c_size_t), ("n_name", c_size_t), ("fault", c_char_p)]


class g4_tool_call(Structure):
    _fields_ = [("name", c_void_p), ("text", c_void_p), ("n_name", c_size_t), ("n", c_size_t), ("fault", c_char_p)]


class g4_message(Structure):
    _fields_ = [
        ("reasoning", c_void_p), ("n_reasoning", c_size_t), ("content", c_void_p), ("n_content", c_size_t), ("calls", POINTER(g4_tool_call)), ("n_calls", c_int),
    ]


STRUCTS = [
    g4_error, g4_options, g4_layer_config, g4_rope_config, g4_config, g4_state_options, g4_row, g4_logit_bias, g4_sampling, g4_logprob,
    g4_engine_options, g4_request, g4_event, g4_engine_stats, g4_chat_marker, g4_chat_prompt, g4_part, g4_tool_call, g4_message,
]

trace_fn = CFUNCTYPE(None, c_void_p, c_char_p, POINTER(c_float), c_int, POINTER(c_int64))
answer_fn = CFUNCTYPE(None, c_void_p, POINTER(g4_part))

# name: (result, arguments). A model, a state and so on is a c_void_p.
error_p, ids_p, floats_p, size_p = POINTER(g4_error), POINTER(c_int32), POINTER(c_float), POINTER(c_size_t)
FUNCTIONS = {
    "g4_open": (c_void_p, [c_char_p, POINTER(g4_options), error_p]),
    "g4_close": (None, [c_void_p]),
    "g4_get_config": (POINTER(g4_config), [c_void_p]),
    "g4_state_open": (c_void_p, [c_void_p, POINTER(g4_state_options), error_p]),
    "g4_state_close": (None, [c_void_p]),
    "g4_state_bytes": (c_size_t, [c_void_p, POINTER(g4_state_options), size_p]),
    "g4_state_get_options": (POINTER(g4_state_options), [c_void_p]),
    "g4_forward": (c_int, [c_void_p, POINTER(g4_row), c_int, floats_p, error_p]),
    "g4_length": (c_int, [c_void_p, c_int]),
    "g4_truncate": (c_int, [c_void_p, c_int, c_int, error_p]),
    "g4_state_get_model": (c_void_p, [c_void_p]),
    "g4_copy": (c_int, [c_void_p, c_int, c_int, c_int, error_p]),
    "g4_sequence_save": (c_int, [c_void_p, c_int, c_int, ids_p, c_char_p, error_p]),
    "g4_sequence_load": (c_int, [c_void_p, c_int, c_char_p, POINTER(ids_p), size_p, error_p]),
    "g4_set_trace": (None, [c_void_p, trace_fn, c_void_p]),
    "g4_backend_name": (c_char_p, [c_int, POINTER(c_char_p)]),
    "g4_model_backend": (c_char_p, [c_void_p]),
    "g4_version": (c_char_p, []),
    "g4_tokenizer_open": (c_void_p, [c_char_p, error_p]),
    "g4_tokenizer_close": (None, [c_void_p]),
    "g4_encode": (c_int, [c_void_p, c_char_p, c_size_t, c_int, POINTER(ids_p), size_p, error_p]),
    "g4_decoder_open": (c_void_p, [c_void_p, c_int, error_p]),
    "g4_decoder_close": (None, [c_void_p]),
    "g4_decode_push": (c_int, [c_void_p, c_int32, POINTER(c_void_p), size_p, error_p]),
    "g4_decode_end": (c_int, [c_void_p, POINTER(c_void_p), size_p, error_p]),
    "g4_token_id": (c_int32, [c_void_p, c_char_p]),
    "g4_token_piece": (c_void_p, [c_void_p, c_int32, size_p]),
    "g4_token_is_special": (c_int, [c_void_p, c_int32]),
    "g4_tokenizer_size": (c_int, [c_void_p]),
    "g4_free": (None, [c_void_p]),
    "g4_default_sampling": (g4_sampling, [c_void_p]),
    "g4_sample": (c_int32, [POINTER(g4_sampling), floats_p, c_int, ids_p, c_size_t, ids_p, c_int, error_p]),
    "g4_logprobs": (c_int, [floats_p, c_int, c_int32, POINTER(c_double), POINTER(g4_logprob), c_int, error_p]),
    "g4_engine_open": (c_void_p, [c_void_p, c_void_p, POINTER(g4_engine_options), error_p]),
    "g4_engine_close": (None, [c_void_p]),
    "g4_engine_add": (c_int64, [c_void_p, POINTER(g4_request), error_p]),
    "g4_engine_cancel": (c_int, [c_void_p, c_int64]),
    "g4_engine_pending": (c_int, [c_void_p]),
    "g4_engine_step": (c_int, [c_void_p, POINTER(POINTER(g4_event))]),
    "g4_engine_get_stats": (None, [c_void_p, POINTER(g4_engine_stats)]),
    "g4_engine_save": (c_int, [c_void_p, ids_p, c_size_t, c_char_p, error_p]),
    "g4_engine_load": (c_int, [c_void_p, c_char_p, error_p]),
    "g4_chat_render": (c_int, [c_char_p, c_size_t, c_int, POINTER(g4_chat_prompt), error_p]),
    "g4_chat_prompt_free": (None, [POINTER(g4_chat_prompt)]),
    "g4_chat_encode": (c_int, [c_void_p, POINTER(g4_chat_prompt), c_int, POINTER(ids_p), size_p, error_p]),
    "g4_chat_recognise": (c_int, [c_char_p, c_size_t, POINTER(c_int)]),
    "g4_chat_family_of": (c_int, [c_char_p, POINTER(g4_config), POINTER(g4_options), POINTER(c_int), error_p]),
    "g4_answer_open": (c_void_p, [c_void_p, c_int, answer_fn, c_void_p, error_p]),
    "g4_answer_close": (None, [c_void_p]),
    "g4_answer_push": (c_int, [c_void_p, c_int32, error_p]),
    "g4_answer_end": (c_int, [c_void_p, error_p]),
    "g4_answer_read": (c_int, [c_void_p, c_int, ids_p, c_size_t, POINTER(g4_message), error_p]),
    "g4_message_free": (None, [POINTER(g4_message)]),
}
# fmt: on

FILE = {"win32": "libgemma4.dll", "darwin": "libgemma4.dylib"}.get(sys.platform, "libgemma4.so")


def candidates() -> "list[str]":
    """Where the library may be, the first that is there wins: what GEMMA4_LIBRARY names, and nothing else then; inside the package, where pip
    put it; the repository's own, where this file is still in its source tree; what the system finds."""
    named = os.environ.get("GEMMA4_LIBRARY")
    if named:
        return [named]
    here = os.path.dirname(os.path.abspath(__file__))
    root = os.path.dirname(os.path.dirname(here))
    found = [os.path.join(here, FILE)]
    if os.path.exists(os.path.join(root, "gemma4.h")):
        found.append(os.path.join(root, FILE))
    found = [path for path in found if os.path.exists(path)]
    installed = None if found else ctypes.util.find_library("gemma4")
    return found + ([installed] if installed else [])


def load() -> ctypes.CDLL:
    paths = candidates()
    if not paths:
        raise ImportError(f"gemma4: {FILE} was found nowhere; build it (`make`, or `pip install ./python`), or set GEMMA4_LIBRARY to its path")
    try:
        library = ctypes.CDLL(paths[0])
    except OSError as e:
        raise ImportError(f"gemma4: {paths[0]} cannot be loaded: {e}") from None
    for name, (result, arguments) in FUNCTIONS.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            raise ImportError(f"gemma4: {paths[0]} has no function {name}: it is not the libgemma4 {VERSION} that this module is for") from None
        function.restype, function.argtypes = result, arguments
    version = library.g4_version().decode()
    if version != VERSION:
        raise ImportError(f"gemma4: {paths[0]} is version {version}, this module is for {VERSION}")
    return library


lib = load()
