import sys
import numpy as np, onnxruntime as ort, time, sys
from onnx import helper as h, TensorProto as T
H,KV,D,CAP=12,2,128,2048
NAT=len(sys.argv)>2
th=int(sys.argv[1])
so=ort.SessionOptions(); NAT and so.register_custom_ops_library('/work/w/attend/jetdraft/native/x86_64.so'); so.intra_op_num_threads=th
def vi(n,sh,t=T.FLOAT): return h.make_tensor_value_info(n,t,sh)
L=28
nodes=[];ins=[vi('q',[1,'n',(H+2*KV)*D]),vi('pos',[1,'n'],T.INT64),vi('sl',[1],T.INT32),vi('tl',[1],T.INT32),vi('cos',[CAP,D//2]),vi('sin',[CAP,D//2])];outs=[]
x='q'
for i in range(L):
    nodes.append(h.make_node('GroupQueryAttention',['q','','',f'pk{i}',f'pv{i}','sl','tl','cos','sin','pos',''],[f'o{i}',f'k{i}',f'v{i}'],domain='jetdraft' if NAT else 'com.microsoft',num_heads=H,kv_num_heads=KV,do_rotary=1,rotary_interleaved=0,local_window_size=0 if NAT else -1,scale=D**-0.5))
    ins+= [vi(f'pk{i}',[1,KV,CAP,D]),vi(f'pv{i}',[1,KV,CAP,D])]; outs+=[vi(f'k{i}',[1,KV,CAP,D]),vi(f'v{i}',[1,KV,CAP,D]),vi(f'o{i}',[1,'n',H*D])]
m=h.make_model(h.make_graph(nodes,'g',ins,outs),opset_imports=[h.make_opsetid('',21),h.make_opsetid('com.microsoft',1),h.make_opsetid('jetdraft',1)],ir_version=10)
s=ort.InferenceSession(m.SerializeToString(),so,providers=['CPUExecutionProvider'])
r=np.random.default_rng(0)
kv=[ort.OrtValue.ortvalue_from_numpy(r.standard_normal((1,KV,CAP,D)).astype('f')) for _ in range(2*L)]
cs=r.standard_normal((CAP,D//2)).astype('f')
for n in (1,2,4,8):
  for past in (256,1024):
    b=s.io_binding()
    b.bind_cpu_input('q',r.standard_normal((1,n,(H+2*KV)*D)).astype('f'));b.bind_cpu_input('pos',np.arange(past,past+n)[None]);b.bind_cpu_input('sl',np.array([past+n-1],'i4'));b.bind_cpu_input('tl',np.array([past+n],'i4'));b.bind_cpu_input('cos',cs);b.bind_cpu_input('sin',cs)
    for i in range(L):
        b.bind_ortvalue_input(f'pk{i}',kv[2*i]);b.bind_ortvalue_input(f'pv{i}',kv[2*i+1]);b.bind_ortvalue_output(f'k{i}',kv[2*i]);b.bind_ortvalue_output(f'v{i}',kv[2*i+1]);b.bind_output(f'o{i}')
    t=[]
    for _ in range(30):
        t0=time.perf_counter();s.run_with_iobinding(b);t.append(time.perf_counter()-t0)
    print(th,'threads',n,'rows',past,'past:',round(min(t)*1e3,2),round(sorted(t)[15]*1e3,2),'ms for 28 layers')
