"""A chat template that takes the `documents` of a request, and puts them between separators."""

# Before a model's own template: the documents are put in front of the first message of the user, so that the beginning
# of the prompt stays the same from turn to turn.
PRELUDE = """\
{%- if documents %}
{%- set lmc = namespace(text='', messages=[], placed=false) %}
{%- for document in documents %}
{%- set lmc.text = lmc.text ~ SEPARATOR ~ ((document.text or document.content) | trim) %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' and not lmc.placed %}
{%- set lmc.placed = true %}
{%- set lmc.messages = lmc.messages + [{'role': 'user', 'content': lmc.text ~ SEPARATOR ~ message.content}] %}
{%- else %}
{%- set lmc.messages = lmc.messages + [message] %}
{%- endif %}
{%- endfor %}
{%- set messages = lmc.messages %}
{%- endif %}
"""


def with_documents(template: str, separator: str) -> str:
    """Return a chat template that puts the `text` (or `content`) of each of a request's documents between separators.

    Without documents it does what `template` does.
    """
    quoted = separator.replace("\\", "\\\\").replace("'", "\\'")
    return PRELUDE.replace("SEPARATOR", f"'{quoted}'") + template
