"""A client that knows JetStream's proto and nothing of ours, in a process of its own, since the names would collide."""

from __future__ import annotations

import json
import subprocess
import sys

from front_doors import open_doors

# Only the facts of JetStream's published interface: names, numbers and types.
PROTO = """
syntax = "proto3";
package jetstream_proto;
service Orchestrator {
  rpc Decode(DecodeRequest) returns (stream DecodeResponse) {}
  rpc HealthCheck(HealthCheckRequest) returns (HealthCheckResponse) {}
}
message DecodeRequest {
  int32 max_tokens = 4;
  message TextContent { string text = 1; }
  message TokenContent { repeated int32 token_ids = 1; }
  oneof content { TextContent text_content = 5; TokenContent token_content = 6; }
  message Metadata { float start_time = 1; }
  oneof metadata_optional { Metadata metadata = 7; }
  int32 num_samples = 8;
  string lora_adapter_id = 9;
  bool has_bos = 10;
  reserved 1, 2, 3;
}
message DecodeResponse {
  message InitialContent {}
  message StreamContent {
    message Sample { string text = 1; repeated int32 token_ids = 2; }
    repeated Sample samples = 1;
  }
  oneof content { InitialContent initial_content = 2; StreamContent stream_content = 3; }
  reserved 1;
}
message HealthCheckRequest {}
message HealthCheckResponse { bool is_live = 1; }
"""

CLIENT = """
import json, sys, grpc
import facts_pb2 as pb, facts_pb2_grpc as rpc
stub = rpc.OrchestratorStub(grpc.insecure_channel(sys.argv[1]))
def read(**fields):
    request = pb.DecodeRequest(metadata=pb.DecodeRequest.Metadata(start_time=1.5), **fields)
    messages = list(stub.Decode(request, timeout=20))
    # As JetStream's own clients read: the first sample of every message.
    return ["".join(m.stream_content.samples[0].text for m in messages),
            [t for m in messages for t in m.stream_content.samples[0].token_ids]]
print(json.dumps({
    "live": stub.HealthCheck(pb.HealthCheckRequest(), timeout=20).is_live,
    "text": read(text_content=pb.DecodeRequest.TextContent(text="ab"), max_tokens=3),
    "ids": read(token_content=pb.DecodeRequest.TokenContent(token_ids=[97, 98]), max_tokens=3, has_bos=True),
    "samples": read(text_content=pb.DecodeRequest.TextContent(text="ab"), max_tokens=2, num_samples=2),
}))
"""


def test_jetstreams_client_works_unchanged(tmp_path):
    (tmp_path / "facts.proto").write_text(PROTO)
    (tmp_path / "client.py").write_text(CLIENT)
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I.", "--python_out=.", "--grpc_python_out=.", "facts.proto"],
        cwd=tmp_path,
        check=True,
        timeout=60,
    )
    with open_doors(http=False) as doors:
        done = subprocess.run(
            [sys.executable, "client.py", doors.grpc.address], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "live": True,
        "text": ["cde", [99, 100, 101]],
        "ids": ["", [99, 100, 101]],
        "samples": ["cd", [99, 100]],
    }
