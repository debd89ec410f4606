"""GLM-5's special tokens, in the order of its own vocabulary (ids 154820 to 154855 there).

A tokeniser trained here gives them the ids 0, 1, 2 … in this order; code looks ids up by name and never
by number. Source: the tokenizer of zai-org/GLM-5.
"""

END_OF_TEXT = "<|endoftext|>"

SPECIAL_TOKENS = (
  END_OF_TEXT,
  "[MASK]",
  "[gMASK]",
  "[sMASK]",
  "<sop>",
  "<eop>",
  "<|system|>",
  "<|user|>",
  "<|assistant|>",
  "<|observation|>",
  "<|begin_of_image|>",
  "<|end_of_image|>",
  "<|begin_of_video|>",
  "<|end_of_video|>",
  "<|begin_of_audio|>",
  "<|end_of_audio|>",
  "<|begin_of_transcription|>",
  "<|end_of_transcription|>",
  "<|code_prefix|>",
  "<|code_middle|>",
  "<|code_suffix|>",
  "<think>",
  "</think>",
  "<tool_call>",
  "</tool_call>",
  "<tool_response>",
  "</tool_response>",
  "<arg_key>",
  "</arg_key>",
  "<arg_value>",
  "</arg_value>",
  "/nothink",
  "<|begin_of_box|>",
  "<|end_of_box|>",
  "<|image|>",
  "<|video|>",
)
