"""Chat completions of a real server, whose documents were learned from files: a small part of `bench/chat.py`."""

import sys
from pathlib import Path

from lmc.demo.pretrained import smollm2

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import chat


def test_documents_of_chats_are_reused_from_the_first_request_on_and_no_conversation_is_learned() -> None:
    found = chat.measure(str(smollm2()), documents=12, requests=20, questions=2)
    assert found["learned"] == found["documents"] >= 12
    assert found["requests"] >= 20
    assert found["least reused"] > 0.99
    assert found["chunks stored"] == found["chunks of documents"]
    assert found["right"]["chat"] == found["right"]["completions"]
