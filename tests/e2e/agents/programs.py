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


async def answers(name: str, words: list[str]) -> list[str]:
    program = globals()[f"with_{name}"]
    return [await program(*words[at : at + 3]) for at in range(0, len(words), 3)]


if __name__ == "__main__":
    print(json.dumps(asyncio.run(answers(sys.argv[1], sys.argv[2:]))))
