"""Names of spans and attributes that other systems know, defined only here.

OpenTelemetry's conventions for generative AI are still in development. These names are from release
1.38 of the semantic conventions, and for latencies from vLLM 0.32.
"""

OPERATION = "gen_ai.operation.name"
CHAT = "chat"
AGENT = "invoke_agent"
AGENT_NAME = "gen_ai.agent.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CONVERSATION = "gen_ai.conversation.id"
SERVER_ADDRESS = "server.address"
ERROR_TYPE = "error.type"

VLLM_REQUEST = "llm_request"
"""Name of the span of one request to vLLM."""
VLLM_REQUEST_ID = "gen_ai.request.id"
VLLM_PROMPT_TOKENS = "gen_ai.usage.prompt_tokens"
VLLM_COMPLETION_TOKENS = "gen_ai.usage.completion_tokens"
VLLM_QUEUE_S = "gen_ai.latency.time_in_queue"
VLLM_FIRST_TOKEN_S = "gen_ai.latency.time_to_first_token"
VLLM_PREFILL_S = "gen_ai.latency.time_in_model_prefill"
VLLM_DECODE_S = "gen_ai.latency.time_in_model_decode"

SERVER = "telescope.server"
"""Resource attribute: the address of the inference server of a span."""
RUN = "telescope.run"
"""Resource attribute: the name of the run."""
STEP = "telescope.step"
EVAL_TAG = "telescope.eval_tag"
"""Which evals a call belongs to: `before`, `after` or `step-N`."""
ATTEMPT = "telescope.attempt"
WEIGHT_VERSION = "telescope.weight_version"
REASON = "telescope.reason"
