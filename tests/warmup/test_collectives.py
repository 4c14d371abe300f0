"""What moves between devices, read from HLO as XLA prints it on CPU and TPU: loops, conditions, both spellings of groups of devices."""

from warmup.collectives import collectives

HLO = """HloModule step, entry_computation_layout={(f32[4,8]{1,0})->f32[4,8]{1,0}}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%layer (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %p = (s32[], f32[4,8]{1,0}) parameter(0)
  %h = f32[4,8]{1,0} get-tuple-element(%p), index=1
  %all-reduce.1 = f32[4,8]{1,0} all-reduce(%h), channel_id=1, replica_groups={{0,1},{2,3}}, use_global_device_ids=true, to_apply=%add
  %gathered = (bf16[4,8]{1,0}, bf16[8,8]{1,0}) all-gather-start(%h), channel_id=2, replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %out = (s32[], f32[4,8]{1,0}) tuple(%i, %all-reduce.1)
}

%going (p: (s32[], f32[4,8])) -> pred[] {
  ROOT %more = pred[] constant(true)
}

%counting (p: (s32[], f32[4,8])) -> pred[] {
  %three = s32[]{:T(128)} constant(3), metadata={op_name="jit(step)"}
  %p = (s32[], f32[4,8]{1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %less = pred[]{:T(512)} compare(%i, %three), direction=LT, metadata={op_name="jit(step)/while/cond/lt"}
}

%counted (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %p = (s32[], f32[4,8]{1,0:T(8,128)S(1)}) parameter(0)
  %scattered = f32[2,8]{1,0:T(8,128)S(1)} reduce-scatter(%p), channel_id=5, replica_groups={{0,2},{1,3}}, to_apply=%add
  ROOT %out = (s32[], f32[4,8]{1,0}) tuple(%i, %h)
}

%wanted (p: f32[4,8]) -> f32[4,8] {
  ROOT %moved = f32[4,8]{1,0} collective-permute(%p), channel_id=3, source_target_pairs={{0,1},{1,0}}
}

%unwanted (p: f32[4,8]) -> f32[4,8] {
  ROOT %p = f32[4,8]{1,0} parameter(0)
}

ENTRY %main (x: f32[4,8]) -> f32[4,8] {
  %x = f32[4,8]{1,0} parameter(0)
  %loop = (s32[], f32[4,8]{1,0}) while(%x), condition=%going, body=%layer, backend_config={"known_trip_count":{"n":"80"}}
  %y = f32[4,8]{1,0} get-tuple-element(%loop), index=1
  %again = (s32[]{:T(128)}, /*index=1*/f32[4,8]{1,0:T(8,128)S(1)}) while(%loop), condition=%counting, body=%counted
  %z = f32[4,8]{1,0} conditional(%c, %y, %y), branch_computations={%wanted, %unwanted}
  ROOT %last = f32[4,8]{1,0} all-reduce(%z), channel_id=4, replica_groups={}, to_apply=%add
}
"""


def test_counts_sizes_and_axes():
    """Devices 0 and 1 differ in `tensor`, 0 and 2 in `data`; no groups: everybody."""
    found = {str(one): one.bytes for one in collectives(HLO, {"data": 2, "expert": 1, "tensor": 2})}
    assert found == {
        "80 x all-reduce of f32[4,8] over tensor": 4 * 8 * 4,
        "80 x all-gather of bf16[8,8] over data": 8 * 8 * 2,
        "3 x reduce-scatter of f32[2,8] over data": 2 * 8 * 4,
        "1 x all-reduce of f32[4,8] over data and tensor": 4 * 8 * 4,
        "1 x collective-permute of f32[4,8] over data and tensor": 4 * 8 * 4,
    }
