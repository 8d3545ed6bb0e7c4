from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.errors import InvalidRequest
from headrace.engine.template import (
    MAX_TEMPLATE_CHARS,
    JinjaTemplate,
    JsonObject,
    TemplateRefused,
    template_supports_thinking,
    template_supports_tools,
)


def render(text: str, **variables: Any) -> str:
    return JinjaTemplate(text, max_seconds=0.05).render(variables)


def doubled(start: str, step: str, n: int = 35) -> str:
    return "{% set a = " + start + " %}" + ("{% set a = " + step + " %}") * n


NESTED_LISTS = doubled("[1]", "[a, a]")
TWO_NESTED_LISTS = NESTED_LISTS + NESTED_LISTS.replace("a", "b")


# What templates expect of Jinja


def test_blocks_leave_no_blank_lines() -> None:
    assert render("{% if true %}\n  {% set x = 1 %}\nx\n{% endif %}\n") == "x\n"


def test_loop_controls_and_generation_blocks_are_known() -> None:
    text = (
        "{% for x in [1, 2, 3] %}{% if x == 3 %}{% break %}{% endif %}"
        "{% generation %}{{ x }}{% endgeneration %}{% endfor %}"
    )
    assert render(text) == "12"


def test_namespaces_keep_their_values_outside_a_loop() -> None:
    text = "{% set ns = namespace(n=0) %}{% for x in [1, 2] %}{% set ns.n = ns.n + x %}{% endfor %}"
    assert render(text + "{{ ns.n }}") == "3"


def test_tojson_keeps_order_and_writes_no_html_escapes() -> None:
    value = {"b": "<é>&'", "a": [1, None, True]}
    assert render("{{ v|tojson }}", v=value) == '{"b": "<é>&\'", "a": [1, null, true]}'


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("indent=2", '{\n  "b": 1,\n  "a": "é"\n}'),
        ("separators=(',', ':')", '{"b":1,"a":"é"}'),
        ("sort_keys=true", '{"a": "é", "b": 1}'),
        ("ensure_ascii=true", '{"b": 1, "a": "\\u00e9"}'),
    ],
)
def test_tojson_takes_the_arguments_of_json_dumps(how: str, expected: str) -> None:
    assert render("{{ v|tojson(" + how + ") }}", v={"b": 1, "a": "é"}) == expected


def test_tojson_with_ascii_only_leaves_noncharacters_unescaped() -> None:
    assert render("{{ v|tojson(ensure_ascii=true) }}", v="\ufdd0é") == '"\ufdd0\\u00e9"'


def test_strings_and_mappings_have_the_methods_that_templates_use() -> None:
    text = (
        "{{ 'a</think>b'.split('</think>')[-1] }}{% for k, v in d.items() %}{{ k ~ v }}{% endfor %}"
    )
    assert render(text + "{{ d.get('z', '-') ~ ' x '.strip() }}", d={"k": 1}) == "bk1-x"


def test_texts_are_sliced_joined_replaced_indented_and_sorted() -> None:
    text = (
        "{{ 'abc'[::-1] }} {{ [1, 2]|join('+') }} {{ '-'.join(['x', 'y']) }}"
        " {{ 'aXa'|replace('a', 'b') }} {{ 'aXa'.replace('a', 'b', 1) }} {{ 'p\nq'|indent(2) }}"
        " {{ {'z': 1, 'y': 2}|dictsort }}"
    )
    assert render(text) == "cba 1+2 x-y bXb bXa p\n  q [('y', 2), ('z', 1)]"


def test_lists_made_by_a_template_can_grow_and_shrink() -> None:
    text = "{% set a = [1] %}{% set _ = a.append(2) %}{{ a.pop(0) }}{{ a }}"
    assert render(text) == "1[2]"


def test_plain_placeholders_are_formatted() -> None:
    assert render("{{ '<{}|{x}>'.format('a', x=1) }}") == "<a|1>"


def test_loop_variables_do_not_reach_methods_called_in_a_loop() -> None:
    text = "{% for x in ['a'] %}{% set y = x %}{{ y.replace('a', 'b') }}{{ y.upper() }}{% endfor %}"
    assert render(text) == "bA"


def test_strftime_now_gives_the_date() -> None:
    assert render("{{ strftime_now('%Y-%m-%d') }}") == time.strftime("%Y-%m-%d")


def test_json_object_is_json_where_printed_or_added_and_a_mapping_elsewhere() -> None:
    text = "{{ v }}|{{ 'x' + v }}|{{ v ~ '' }}|{{ v is mapping }}|{{ v.a }}|{{ v|tojson }}"
    assert render(text, v=JsonObject(a="é")) == "|".join(
        ['{"a": "é"}', 'x{"a": "é"}', '{"a": "é"}', "True", "é", '{"a": "é"}']
    )


# Errors


def test_raise_exception_gives_the_template_s_sentence_alone() -> None:
    with pytest.raises(TemplateRefused, match=r"^roles must alternate$"):
        render("{{ raise_exception('roles must alternate') }}")


def test_sentence_is_one_that_json_can_carry() -> None:
    with pytest.raises(TemplateRefused, match=r"^\? x$"):
        render("{{ raise_exception('\\ud800 \ufdd0x') }}")


@pytest.mark.parametrize(
    "text",
    [
        "{% for m in messages %}{{ m.content }",
        "{% if true %}",
        "{{ 'x'|no_such_filter }}",
        "{% for x in [1] %}" * 40 + "{% endfor %}" * 40,
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "x" * (MAX_TEMPLATE_CHARS + 1),
    ],
)
def test_text_that_does_not_compile_is_a_fault_and_an_error_of_each_rendering(text: str) -> None:
    template = JinjaTemplate(text)
    assert template.fault.startswith("chat template: ")
    with pytest.raises(InvalidRequest, match=r"^chat template: "):
        template.render({})


def test_syntax_error_names_the_line_and_does_not_quote_the_template() -> None:
    assert JinjaTemplate("secret\n{{ x }").fault == "chat template: line 2: unexpected '}'"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{{ messages[0].nope.deep }}", "'dict object' has no attribute 'nope'"),
        ("{{ nothing.deep }}", "'nothing' is undefined"),
        ("{{ 'a' + 1 }}", "can only concatenate str"),
        ("{{ 1 // 0 }}", "integer division or modulo by zero"),
        ("{% include 'x' %}", "no loader for this environment specified"),
    ],
)
def test_failing_template_is_a_bad_request_that_says_why(text: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^chat template: {reason}"):
        render(text, messages=[{"role": "user"}])


# The sandbox


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__'].__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ ''|attr('__class__') }}",
        "{{ cycler.__init__.__globals__.os.system('touch PATH') }}",
        "{{ namespace.__init__.__globals__.os.system('touch PATH') }}",
        "{{ lipsum.__globals__['os'].popen('touch PATH') }}",
        "{{ raise_exception.__globals__.time.sleep(1) }}",
        "{{ self._TemplateReference__context.environment }}",
        "{% macro f() %}{% endmacro %}{{ f._func.__globals__ }}",
        "{% for x in [1] %}{{ loop.__init__.__globals__.x }}{% endfor %}",
        "{{ dict.__subclasses__() }}",
    ],
)
def test_python_s_internals_are_out_of_reach(text: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with pytest.raises(InvalidRequest):
        render(text.replace("PATH", str(mark)))
    assert not mark.exists()


@pytest.mark.parametrize(
    "text",
    [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% for a in range(100000) %}{% for b in range(100000) if false %}{% endfor %}{% endfor %}",
        "{% for a in range(100000) %}{{ range(100000)|select('eq', 7)|list }}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}"
        + "{% call f() %}" * 18 + "x" + "{% endcall %}" * 18,
        "{% for a in range(100000) if [" + "a," * 5000 + "] is none %}{% endfor %}",
        "{% macro m0() %}{% endmacro %}" + "".join(
            f"{{% macro m{n + 1}() %}}{{% set _ = m{n}() %}}{{% set _ = m{n}() %}}{{% endmacro %}}"
            for n in range(35)
        ) + "{% set _ = m35() %}",
        NESTED_LISTS + "{{ a }}",
        NESTED_LISTS + "{{ a|tojson }}",
        NESTED_LISTS + "{{ a|tojson(indent=2) }}",
        TWO_NESTED_LISTS + "{{ a == b }}",
        TWO_NESTED_LISTS + "{{ a in [b] }}",
        TWO_NESTED_LISTS + "{{ a is eq(b) }}",
        TWO_NESTED_LISTS + "{{ [a, b]|sort }}",
        TWO_NESTED_LISTS + "{{ [b].index(a) }}",
        doubled("(1,)", "(a, a)") + "{{ {a: 1} }}",
        doubled("[]", "[a, a]") + "{{ a }}",
    ],
)  # fmt: skip
def test_endless_rendering_ends_at_the_time_limit(text: str) -> None:
    start = time.monotonic()
    with pytest.raises(InvalidRequest, match=r"^chat template: it runs for more than 0\.05 s$"):
        render(text)
    assert time.monotonic() - start < 2


def test_template_can_t_switch_the_time_limit_off() -> None:
    text = "{% set tick = 1 %}{% set environment = 2 %}{% set context = 3 %}{% set t_1 = 4 %}"
    loops = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequest, match="it runs for more than"):
        render(text + loops)


@pytest.mark.parametrize(
    "text",
    [
        "{{ 'x' * 1000000000 }}",
        "{{ 1000000000 * 'x' }}",
        "{{ [0] * 1000000000 }}",
        "{{ (1,) * 1000000000 }}",
        doubled("'xxxx'", "a ~ a"),
        doubled("'xxxx'", "a + a"),
        doubled("[1]", "a + a"),
        "{% set a = 'xxxx' %}" + "{% set a %}{{ a }}{{ a }}{% endset %}" * 40,
        "{% set a %}{% for i in range(100000) %}" + "x" * 10000 + "{% endfor %}{% endset %}",
        "{% for i in range(100000) %}" + "x" * 10000 + "{% endfor %}",
        "{% set a = 'x' * 1000000 %}{{ a.replace('x', a) }}",
        "{% set a = 'x' * 1000000 %}{{ a|replace('', a) }}",
        "{% set a = 'x' * 1000000 %}{{ a.join(['y'] * 1000) }}",
        "{% set a = 'x' * 1000000 %}{{ (['y'] * 1000)|join(a) }}",
        "{% set a = 'x' * 1000000 %}{{ ('{}' * 1000).format(a) }}",
        "{{ ('x\n' * 100000)|indent(1000000) }}",
        "{{ 'x'|indent(1000000000, true) }}",
        "{% set a = 'x' * 8000000 %}" + "".join(f"{{% set b{n} = a[1:] %}}" for n in range(50)),
        "{% set a = 'x' * 8000000 %}" + "".join(f"{{% set b{n} = a|upper %}}" for n in range(50)),
        "{% set a = 'x ' * 4000000 %}"
        + "".join(f"{{% set b{n} = a.split() %}}" for n in range(50)),
    ],
)
def test_text_that_grows_without_bounds_is_refused_before_it_is_made(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^chat template: it makes too much text$"):
        JinjaTemplate(text).render({})


@pytest.mark.parametrize(
    "text",
    [
        "{{ 7 ** 1000000000 }}",
        doubled("7", "a * a") + "{{ a }}",
        "{{ ('f' * 8000000)|int(base=16) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%1000000000d' is divisibleby(3) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 1000000000) }}",
        "{{ 'x'.ljust(1000000000) }}",
        "{{ 'x'|center(1000000000) }}",
        "{{ [1]|batch(1000000000, 'x')|list }}",
        "{{ [1]|tojson(indent=1000000000) }}",
        "{{ [1, 2]|tojson(separators=('x' * 1000000, 'y')) }}",
        "{{ (5).to_bytes(1000000000, 'big') }}",
        "{{ strftime_now('%c' * 1000000) }}",
        "{{ range(1000000000)|list }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% block a %}{{ self.a() }}{% endblock %}",
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "{% set a = [1] %}{% set _ = a.append(a) %}{{ a }}",
    ],
)
def test_what_can_t_be_bounded_is_refused(text: str) -> None:
    start = time.monotonic()
    with pytest.raises(InvalidRequest, match=r"^chat template: "):
        JinjaTemplate(text).render({})
    assert time.monotonic() - start < 1


def test_parity_test_does_not_format_text() -> None:
    assert (
        render("{{ '%1000000000d' is odd or '%1000000000d' is even }}{{ 3 is odd }}") == "FalseTrue"
    )


def test_constants_are_not_evaluated_while_compiling() -> None:
    assert JinjaTemplate("{{ 'x' * 1000000000 }}{{ 'x'|replace('', 'y' * 9999999) }}").fault == ""


def test_recursion_in_a_thread_is_an_error_of_the_rendering() -> None:
    said: list[str] = []

    def run() -> None:
        try:
            render("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")
        except InvalidRequest as error:
            said.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert said == ["chat template: it nests too deeply"]


class Gate:
    """Holds a rendering up where the template prints it."""

    def __init__(self) -> None:
        self.is_reached = threading.Event()
        self.is_open = threading.Event()

    def __str__(self) -> str:
        self.is_reached.set()
        self.is_open.wait(10)
        return "through"


def test_limits_reached_in_one_thread_do_not_end_another_s_rendering() -> None:
    template = JinjaTemplate("{{ gate }}{{ 'x' * n }}")
    gate = Gate()
    answers: list[str] = []
    variables = {"gate": gate, "n": 1}
    thread = threading.Thread(target=lambda: answers.append(template.render(variables)))
    thread.start()
    assert gate.is_reached.wait(10)
    with pytest.raises(InvalidRequest, match="it makes too much text"):
        template.render({"gate": "", "n": 10**9})
    gate.is_open.set()
    thread.join()
    assert answers == ["throughx"]


# Capabilities


@pytest.mark.parametrize(
    ("text", "expected"),
    [("{% if tools %}", True), ("{{ m.tool_calls }}", True), ("{{ m.content }}", False)],
)
def test_tools_are_supported_by_a_template_that_mentions_them(text: str, expected: bool) -> None:
    assert template_supports_tools(text) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>{{ m.reasoning_content }}</think>", True),
        ("{{ m.content.split('</think>')[-1] }}", True),
        ("{% set reasoning_content = m.content.split('</think>')[0] %}", False),
        ("{{ '</think>' in m.content }}", False),
        ("{{ m.content }}<think>", False),
    ],
)
def test_thinking_is_supported_by_both_tags_or_by_cutting_at_the_end_tag(
    text: str, expected: bool
) -> None:
    assert template_supports_thinking(text) is expected
