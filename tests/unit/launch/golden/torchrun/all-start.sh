ssh -T -o BatchMode=yes -o ConnectTimeout=10 -p 2222 -o ProxyJump=gate -l me -- 10.0.0.7 'bash '"'"'/mnt/a b/jobs/demo-20300102-030405/agent.sh'"'"' 10.0.0.7'
ssh -T -o BatchMode=yes -o ConnectTimeout=10 -p 2222 -o ProxyJump=gate -l me -- node-2.cluster 'bash '"'"'/mnt/a b/jobs/demo-20300102-030405/agent.sh'"'"' node-2.cluster'
