"""Programs of agent libraries, as their users write them: each adds numbers with a tool.

Run as `python programs.py NAME BASE_URL API_KEY MODEL [BASE_URL API_KEY MODEL]...`: asks one
endpoint after the other, and prints the answers. The virtual environment of these libraries has
nothing of Telescope.
"""

import asyncio
import json
import sys

TASK = "What is 1+2, and that plus 3+4? Add with the tool, one step at a time."


def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return f"sum={a + b}"


SCHEMA = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


async def with_litellm(base_url: str, api_key: str, model: str) -> str:
    import litellm

    messages = [{"role": "user", "content": TASK}]
    while True:
        reply = await litellm.acompletion(
            model=f"openai/{model}",
            api_base=base_url,
            api_key=api_key,
            messages=messages,
            tools=[SCHEMA],
        )
        said = reply.choices[0].message
        messages.append(said)
        if not said.tool_calls:
            return said.content
        for call in said.tool_calls:
            result = add(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def with_openai_agents(base_url: str, api_key: str, model: str) -> str:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    agent = agents.Agent(
        name="adder",
        instructions="You add.",
        model=agents.OpenAIChatCompletionsModel(model=model, openai_client=client),
        tools=[agents.function_tool(add)],
    )
    return (await agents.Runner.run(agent, TASK)).final_output


async def with_pydantic_ai(base_url: str, api_key: str, model: str) -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=base_url, api_key=api_key)
    agent = Agent(OpenAIChatModel(model, provider=provider), system_prompt="You add.")
    agent.tool_plain(add)
    return (await agent.run(TASK)).output


async def with_langgraph(base_url: str, api_key: str, model: str) -> str:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    chat = ChatOpenAI(model=model, base_url=base_url, api_key=api_key)
    with_tools = chat.bind_tools([tool(add)])

    async def think(state: MessagesState) -> dict:
        return {"messages": [await with_tools.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode([tool(add)]))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition)
    graph.add_edge("tools", "think")
    ended = await graph.compile().ainvoke({"messages": [("user", TASK)]})
    return ended["messages"][-1].content


async def with_smolagents(base_url: str, api_key: str, model: str) -> str:
    import smolagents

    chat = smolagents.OpenAIModel(
        model_id=model, api_base=base_url, api_key=api_key, tool_choice="auto"
    )
    agent = smolagents.ToolCallingAgent(
        tools=[smolagents.tool(add)], model=chat, max_steps=5, verbosity_level=0
    )
    return str(await asyncio.to_thread(agent.run, TASK))


async def with_adk(base_url: str, api_key: str, model: str) -> str:
    from google.adk.agents import LlmAgent
    from google.adk.models.lite_llm import LiteLlm
    from google.adk.runners import InMemoryRunner
    from google.genai.types import Content, Part

    chat = LiteLlm(model=f"openai/{model}", api_base=base_url, api_key=api_key)
    agent = LlmAgent(name="adder", model=chat, instruction="You add.", tools=[add])
    runner = InMemoryRunner(agent=agent, app_name="app")
    session = await runner.session_service.create_session(app_name="app", user_id="me")
    task = Content(role="user", parts=[Part(text=TASK)])
    events = runner.run_async(user_id="me", session_id=session.id, new_message=task)
    ended = [event async for event in events if event.is_final_response()]
    return "".join(part.text or "" for part in ended[-1].content.parts if not part.thought)


async def with_agent_framework(base_url: str, api_key: str, model: str) -> str:
    from agent_framework import Agent
    from agent_framework.openai import OpenAIChatCompletionClient

    client = OpenAIChatCompletionClient(model=model, api_key=api_key, base_url=base_url)
    agent = Agent(client=client, instructions="You add.", name="adder", tools=[add])
    return (await agent.run(TASK)).text


async def with_agent_framework_responses(base_url: str, api_key: str, model: str) -> str:
    from agent_framework import Agent
    from agent_framework.openai import OpenAIChatClient

    # Its turns name the answer before them, and do not send it back.
    client = OpenAIChatClient(model=model, api_key=api_key, base_url=base_url)
    agent = Agent(client=client, instructions="You add.", tools=[add])
    return (await agent.run(TASK)).text


async def with_agentscope(base_url: str, api_key: str, model: str) -> str:
    from agentscope.agent import Agent
    from agentscope.credential import OpenAICredential
    from agentscope.message import UserMsg
    from agentscope.model import OpenAIChatModel
    from agentscope.tool import FunctionTool, Toolkit

    credential = OpenAICredential(api_key=api_key, base_url=base_url)
    chat = OpenAIChatModel(
        credential, model=model, parameters=OpenAIChatModel.Parameters(), context_size=32000
    )
    toolkit = Toolkit(tools=[FunctionTool(add, is_read_only=True)])
    agent = Agent("adder", "You add.", chat, toolkit=toolkit)
    return (await agent.reply(UserMsg("user", TASK))).get_text_content()


async def with_agno(base_url: str, api_key: str, model: str) -> str:
    from agno.agent import Agent
    from agno.models.openai.like import OpenAILike

    chat = OpenAILike(id=model, base_url=base_url, api_key=api_key)
    agent = Agent(model=chat, instructions="You add.", tools=[add], telemetry=False)
    return (await agent.arun(TASK)).content


async def with_autogen(base_url: str, api_key: str, model: str) -> str:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    about = {"function_calling": True, "structured_output": True, "family": "unknown"}
    client = OpenAIChatCompletionClient(
        model=model,
        base_url=base_url,
        api_key=api_key,
        model_info={"vision": False, "json_output": True, **about},
    )
    agent = AssistantAgent("adder", model_client=client, tools=[add], max_tool_iterations=5)
    return (await agent.run(task=TASK)).messages[-1].content


async def with_haystack(base_url: str, api_key: str, model: str) -> str:
    from haystack.components.agents import Agent
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function
    from haystack.utils import Secret

    chat = OpenAIChatGenerator(
        api_key=Secret.from_token(api_key), model=model, api_base_url=base_url
    )
    agent = Agent(
        chat_generator=chat, system_prompt="You add.", tools=[create_tool_from_function(add)]
    )
    return (await agent.run_async(messages=[ChatMessage.from_user(TASK)]))["last_message"].text


async def with_langchain(base_url: str, api_key: str, model: str) -> str:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model=model, base_url=base_url, api_key=api_key)
    agent = create_agent(chat, system_prompt="You add.", tools=[add], name="adder")
    return (await agent.ainvoke({"messages": [("user", TASK)]}))["messages"][-1].content


async def with_llama_index(base_url: str, api_key: str, model: str) -> str:
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.llms.openai_like import OpenAILike

    chat = OpenAILike(
        model=model,
        api_base=base_url,
        api_key=api_key,
        is_chat_model=True,
        is_function_calling_model=True,
        temperature=1.0,
    )
    return str(await FunctionAgent(llm=chat, system_prompt="You add.", tools=[add]).run(TASK))


async def with_strands(base_url: str, api_key: str, model: str) -> str:
    from strands import Agent, tool
    from strands.models.openai import OpenAIModel

    chat = OpenAIModel(client_args={"api_key": api_key, "base_url": base_url}, model_id=model)
    agent = Agent(model=chat, tools=[tool(add)], system_prompt="You add.", callback_handler=None)
    return str(await agent.invoke_async(TASK)).strip()


async def answers(name: str, words: list[str]) -> list[str]:
    program = globals()[f"with_{name}"]
    return [await program(*words[at : at + 3]) for at in range(0, len(words), 3)]


if __name__ == "__main__":
    print(json.dumps(asyncio.run(answers(sys.argv[1], sys.argv[2:]))))
