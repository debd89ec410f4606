"""Small scheduled modules in the TPU compiler's spelling, cut down to what is read from them."""


def cycles(count: int) -> str:
  """The part of an instruction that carries the compiler's estimate."""
  return f'backend_config={{"window_config":{{"estimated_cycles":"{count}"}}}}'


# A scan of 12 products of [4096, 4096] matrices, as `jax.lax.scan` compiles to on v5p.
SCAN = f"""HloModule jit_scan, is_scheduled=true, num_partitions=4

FileNames
1 "scan.py"

%bitcast_fusion (bitcast_input: bf16[4096,4096]) -> bf16[4096,4096] {{
  %bitcast_input = bf16[4096,4096]{{1,0:T(8,128)(2,1)}} parameter(0)
  ROOT %bitcast.9 = bf16[4096,4096]{{1,0:T(8,128)(2,1)}} bitcast(%bitcast_input)
}}

%slice_fusion (param_0.1: bf16[12,4096,4096], param_1.1: s32[]) -> bf16[4096,4096] {{
  %param_0.1 = bf16[12,4096,4096]{{2,1,0:T(8,128)(2,1)}} parameter(0)
  %param_1.1 = s32[]{{:T(128)S(6)}} parameter(1)
  %constant.2 = s32[]{{:T(128)}} constant(0)
  %dynamic_slice.9 = bf16[1,4096,4096]{{2,1,0:T(8,128)(2,1)}} dynamic-slice(%param_0.1, %param_1.1, %constant.2), dynamic_slice_sizes={{1,4096,4096}}
  ROOT %bitcast.8 = bf16[4096,4096]{{1,0:T(8,128)(2,1)}} bitcast(%dynamic_slice.9)
}}

%matmul_fusion (param_0.2: bf16[4096,4096], param_1.2: bf16[12,4096,4096], param_2.2: s32[]) -> bf16[4096,4096] {{
  %param_0.2 = bf16[4096,4096]{{1,0:T(8,128)(2,1)}} parameter(0)
  %fusion.12 = bf16[4096,4096]{{1,0:T(8,128)(2,1)}} fusion(%param_0.2), kind=kLoop, calls=%bitcast_fusion
  %param_1.2 = bf16[12,4096,4096]{{2,1,0:T(8,128)(2,1)}} parameter(1)
  %param_2.2 = s32[]{{:T(128)S(6)}} parameter(2)
  %fusion.11 = bf16[4096,4096]{{1,0:T(8,128)(2,1)}} fusion(%param_1.2, %param_2.2), kind=kLoop, calls=%slice_fusion
  ROOT %convolution.5 = bf16[4096,4096]{{1,0:T(8,128)(2,1)}} convolution(%fusion.12, %fusion.11), dim_labels=bf_io->bf
}}

%body (state: (s32[], bf16[4096,4096], bf16[12,4096,4096], s32[])) -> (s32[], bf16[4096,4096], bf16[12,4096,4096], s32[]) {{
  %constant.1 = s32[]{{:T(128)}} constant(1)
  %state = (s32[]{{:T(128)}}, bf16[4096,4096]{{1,0}}, bf16[12,4096,4096]{{2,1,0}}, s32[]{{:T(128)}}) parameter(0)
  %gte.46 = s32[]{{:T(128)}} get-tuple-element(%state), index=0
  %copy.2 = s32[]{{:T(128)S(6)}} copy(%gte.46)
  %add.4 = s32[]{{:T(128)}} add(%copy.2, %constant.1)
  %gte.53 = s32[]{{:T(128)}} get-tuple-element(%state), index=3
  %gte.52 = bf16[12,4096,4096]{{2,1,0:T(8,128)(2,1)}} get-tuple-element(%state), index=2
  %gte.47 = bf16[4096,4096]{{1,0:T(8,128)(2,1)}} get-tuple-element(%state), index=1
  %copy.11 = bf16[4096,4096]{{1,0:T(8,128)(2,1)}} copy(%gte.47), {cycles(117624)}
  %fusion.13 = bf16[4096,4096]{{1,0:T(8,128)(2,1)}} fusion(%copy.11, %gte.52, %copy.2), kind=kOutput, calls=%matmul_fusion, metadata={{op_name="jit(scan)/while/body/closed_call/dot_general"}}, {cycles(631912)}
  ROOT %tuple.14 = (s32[]{{:T(128)}}, bf16[4096,4096]{{1,0}}, bf16[12,4096,4096]{{2,1,0}}, s32[]{{:T(128)}}) tuple(%add.4, %fusion.13, %gte.52, %gte.53)
}}

%condition (state.1: (s32[], bf16[4096,4096], bf16[12,4096,4096], s32[])) -> pred[] {{
  %constant.5 = s32[]{{:T(128)}} constant(12)
  %state.1 = (s32[]{{:T(128)}}, bf16[4096,4096]{{1,0}}, bf16[12,4096,4096]{{2,1,0}}, s32[]{{:T(128)}}) parameter(0)
  %gte.26 = s32[]{{:T(128)}} get-tuple-element(%state.1), index=0
  ROOT %lt.3 = pred[]{{:T(512)}} compare(%gte.26, %constant.5), direction=LT
}}

ENTRY %main (x.1: bf16[4096,4096], w.1: bf16[12,4096,4096]) -> bf16[4096,4096] {{
  %constant.8 = s32[]{{:T(128)}} constant(0)
  %constant.9 = s32[]{{:T(128)}} constant(1)
  %w.1 = bf16[12,4096,4096]{{2,1,0:T(8,128)(2,1)}} parameter(1), metadata={{op_name="w"}}
  %x.1 = bf16[4096,4096]{{1,0:T(8,128)(2,1)}} parameter(0), metadata={{op_name="x"}}
  %copy.10 = bf16[4096,4096]{{1,0:T(8,128)(2,1)}} copy(%x.1), {cycles(117624)}
  %copy.9 = s32[]{{:T(128)}} copy(%constant.8)
  %tuple.12 = (s32[]{{:T(128)}}, bf16[4096,4096]{{1,0}}, bf16[12,4096,4096]{{2,1,0}}, s32[]{{:T(128)}}) tuple(%copy.9, %copy.10, %w.1, %constant.9)
  %while.9 = (s32[]{{:T(128)}}, bf16[4096,4096]{{1,0}}, bf16[12,4096,4096]{{2,1,0}}, s32[]{{:T(128)}}) while(%tuple.12), condition=%condition, body=%body, metadata={{op_name="jit(scan)/while"}}
  ROOT %gte.16 = bf16[4096,4096]{{1,0:T(8,128)(2,1)}} get-tuple-element(%while.9), index=1
}}
"""  # noqa: E501


def nested(outer: int, inner: str, step: int = 1, direction: str = "LT", start: int = 0) -> str:
  """A loop of `outer` rounds around one whose counter starts at `start` and is compared with `inner`.

  `inner` is "constant(N)", or "carried": then the bound is a value 6 that both loops hand on unchanged. Each
  round of the inner loop costs 100 cycles, each of the outer one 1,000 more.
  """
  state = "(s32[], s32[])"
  bound = "get-tuple-element(%inner_seen), index=1" if inner == "carried" else inner
  return f"""HloModule nested, is_scheduled=true

%inner_body (inner_state: {state}) -> {state} {{
  %inner_state = {state} parameter(0)
  %inner_i = s32[] get-tuple-element(%inner_state), index=0
  %inner_step = s32[] constant({step})
  %inner_next = s32[] add(%inner_i, %inner_step)
  %inner_bound = s32[] get-tuple-element(%inner_state), index=1
  %inner_work = f32[8,128] broadcast(%inner_i), dimensions={{}}, {cycles(100)}
  ROOT %inner_out = {state} tuple(%inner_next, %inner_bound)
}}

%inner_condition (inner_seen: {state}) -> pred[] {{
  %inner_seen = {state} parameter(0)
  %inner_seen_i = s32[] get-tuple-element(%inner_seen), index=0
  %inner_limit = s32[] {bound}
  ROOT %inner_compare = pred[] compare(%inner_seen_i, %inner_limit), direction={direction}
}}

%outer_body (outer_state: {state}) -> {state} {{
  %outer_state = {state} parameter(0)
  %outer_i = s32[] get-tuple-element(%outer_state), index=0
  %one = s32[] constant(1)
  %outer_next = s32[] add(%outer_i, %one)
  %outer_bound = s32[] get-tuple-element(%outer_state), index=1
  %begin = s32[] constant({start})
  %inner_in = {state} tuple(%begin, %outer_bound)
  %inner_while = {state} while(%inner_in), condition=%inner_condition, body=%inner_body, metadata={{op_name="inner"}}
  %outer_work = f32[8,128] broadcast(%outer_i), dimensions={{}}, {cycles(1000)}
  ROOT %outer_out = {state} tuple(%outer_next, %outer_bound)
}}

%fused_compare (p0: s32[]) -> pred[] {{
  %p0 = s32[] parameter(0)
  %limit = s32[] constant({outer})
  ROOT %flipped = pred[] compare(%limit, %p0), direction=GT
}}

%outer_condition (outer_seen: {state}) -> pred[] {{
  %outer_seen = {state} parameter(0)
  %outer_seen_i = s32[] get-tuple-element(%outer_seen), index=0
  ROOT %outer_compare = pred[] fusion(%outer_seen_i), kind=kLoop, calls=%fused_compare
}}

ENTRY %main (n: s32[]) -> s32[] {{
  %n = s32[] parameter(0)
  %zero = s32[] constant(0)
  %six = s32[] constant(6)
  %start = {state} tuple(%zero, %six)
  %outer_while = {state} while(%start), condition=%outer_condition, body=%outer_body, metadata={{op_name="outer"}}
  ROOT %last = s32[] get-tuple-element(%outer_while), index=0
}}
"""  # noqa: E501


# One of each kind of collective over a mesh of fsdp 2 × expert 4, in all three spellings of groups.
COLLECTIVES = """HloModule exchange, is_scheduled=true, num_partitions=8

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%all-reduce-scatter (input: bf16[4096,4096]) -> bf16[2128,4096] {
  %input = bf16[4096,4096]{1,0:T(8,128)(2,1)} parameter(0)
  %zero = bf16[] constant(0)
  %pad = bf16[4256,4096]{1,0:T(8,128)(2,1)} pad(%input, %zero), padding=0_160x0_0
  %all-reduce.1 = bf16[4256,4096]{1,0:T(8,128)(2,1)} all-reduce(%pad), replica_groups={{0,4},{1,5},{2,6},{3,7}}, use_global_device_ids=true, to_apply=%sum
  %place = u32[] constant(0)
  ROOT %own = bf16[2128,4096]{1,0:T(8,128)(2,1)} dynamic-slice(%all-reduce.1, %place, %place), dynamic_slice_sizes={2128,4096}
}

ENTRY %main (x: bf16[512,256], y: f32[512,256], z: bf16[4096,4096]) -> bf16[2128,4096] {
  %x = bf16[512,256]{1,0:T(8,128)(2,1)} parameter(0)
  %y = f32[512,256]{1,0:T(8,128)} parameter(1)
  %z = bf16[4096,4096]{1,0:T(8,128)(2,1)} parameter(2)
  %gather = bf16[1024,256]{1,0} all-gather(%x), channel_id=1, replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}, use_global_device_ids=true
  %deal = f32[4,128,256]{2,1,0} all-to-all(%y), channel_id=2, replica_groups=[2,4]<=[8], dimensions={0}
  %start = (bf16[512,256]{1,0}, bf16[2048,256]{1,0}) all-gather-start(%x), channel_id=3, replica_groups=[2,4]<=[8], dimensions={0}
  %done = bf16[2048,256]{1,0} all-gather-done(%start)
  %total = f32[512,256]{1,0} all-reduce(%y), replica_groups=mesh['axis_0'=8] {'axis_0'}, to_apply=%sum
  %pass = (bf16[512,256]{1,0}, bf16[512,256]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%x), source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}
  %passed = bf16[512,256]{1,0} collective-permute-done(%pass)
  ROOT %scatter = bf16[2128,4096]{1,0} fusion(%z), kind=kCustom, calls=%all-reduce-scatter
}
"""  # noqa: E501

# A sort, a Pallas kernel that declares its FLOPs and one that does not, a branch, and a copy from the host.
UNPRICED = f"""HloModule kernels, is_scheduled=true

%cheap (c.1: f32[8,128]) -> f32[8,128] {{
  %c.1 = f32[8,128] parameter(0)
  ROOT %small = f32[8,128] copy(%c.1), {cycles(10)}
}}

%dear (d.1: f32[8,128]) -> f32[8,128] {{
  %d.1 = f32[8,128] parameter(0)
  ROOT %large = f32[8,128] copy(%d.1), {cycles(500)}
}}

%less (l: f32[], r: f32[]) -> pred[] {{
  %l = f32[] parameter(0)
  %r = f32[] parameter(1)
  ROOT %lt = pred[] compare(%l, %r), direction=LT
}}

ENTRY %main (p: pred[], x: f32[8,128], h: f32[64,128]) -> f32[8,128] {{
  %p = pred[] parameter(0)
  %x = f32[8,128]{{1,0:T(8,128)}} parameter(1)
  %h = f32[64,128]{{1,0:T(8,128)S(5)}} parameter(2)
  %copy-start = (f32[64,128]{{1,0:T(8,128)}}, f32[64,128]{{1,0:T(8,128)S(5)}}, u32[]{{:S(2)}}) copy-start(%h)
  %copy-done = f32[64,128]{{1,0:T(8,128)}} copy-done(%copy-start)
  %sort.3 = f32[8,128]{{1,0:T(8,128)}} sort(%x), dimensions={{1}}, to_apply=%less, metadata={{op_name="jit(f)/sort"}}
  %buffer = f32[8,128] custom-call(), custom_call_target="AllocateBuffer"
  %splash.1 = f32[8,128]{{1,0}} custom-call(%sort.3), custom_call_target="tpu_custom_call", metadata={{op_name="jit(f)/attend/pallas_call"}}, frontend_attributes={{kernel_metadata={{
"name": "splash (causal)"
}}}}, backend_config={{"custom_call_config":{{"body":"TUzv("}}}}
  %gmm.1 = f32[8,128]{{1,0}} custom-call(%splash.1), custom_call_target="tpu_custom_call", metadata={{op_name="jit(f)/moe/pallas_call"}}, backend_config={{"custom_call_config":{{"cost_estimate":{{"flops":"4096","transcendentals":"0"}}}}}}
  %gmm.2 = f32[8,128]{{1,0}} custom-call(%gmm.1), custom_call_target="tpu_custom_call", metadata={{op_name="jit(f)/moe/pallas_call"}}, backend_config={{"custom_call_config":{{"cost_estimate":{{"flops":"4096","transcendentals":"0"}}}}}}
  %silent = f32[8,128]{{1,0}} fusion(%gmm.2), kind=kCustom, calls=%cheap, backend_config={{"window_config":{{"estimated_cycles":"9223372036854775807"}}}}
  ROOT %conditional = f32[8,128] conditional(%p, %silent, %silent), true_computation=%cheap, false_computation=%dear
}}
"""  # noqa: E501
