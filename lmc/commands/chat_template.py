"""A chat template that takes the `documents` of a request, and puts them between separators."""

from lmc.blend.segments import PASSES, bare_and_apart

# Before a model's own template: the documents are put in front of the first message of the user, so that the beginning
# of the prompt stays the same from turn to turn. What the message has beside its content stays. Content is a text, or a
# list of parts where the model's own template goes through parts. That template gets no documents, so that it does not
# write them again.
PRELUDE = """\
{%- if documents %}
{%- set lmc = namespace(text='', messages=[], placed=false) %}
{%- for document in documents %}
{%- set lmc.one = (document.text or document.content or '') | trim %}
{%- if not lmc.one %}{{ raise_exception('a document of this request has no text') }}{%- endif %}
{%- set lmc.text = lmc.text ~ SEPARATOR ~ lmc.oneAPART %}
{%- endfor %}
{%- set lmc.text = lmc.text ~ SEPARATOR %}
{%- for message in messages %}
{%- if message.role == 'user' and not lmc.placed %}
{%- set lmc.placed = true %}
{%- if message.content is string %}
{%- set lmc.messages = lmc.messages + [dict(message, content=lmc.text ~ message.content)] %}
{%- else %}
{%- set lmc.messages = lmc.messages + [dict(message, content=[{'type': 'text', 'text': lmc.text}] + message.content)] %}
{%- endif %}
{%- else %}
{%- set lmc.messages = lmc.messages + [message] %}
{%- endif %}
{%- endfor %}
{%- if not lmc.placed %}{{ raise_exception('a request with documents needs a message of the user') }}{%- endif %}
{%- set messages = lmc.messages %}
{%- set documents = none %}
{%- endif %}
"""


def with_documents(template: str, separator: str) -> str:
    """Return a chat template that puts the `text` (or `content`) of each of a request's documents between separators.

    A separator inside of a document is written so that it does not cut it, as `lmc.rag.messages` does. Without
    documents, the template does what `template` does.
    """
    bare, apart = map(_quoted, bare_and_apart(separator))
    prelude = PRELUDE.replace("APART", f" | replace({bare}, {apart})" * PASSES)
    return prelude.replace("SEPARATOR", _quoted(separator)) + template


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
