ssh -T -o BatchMode=yes -o ConnectTimeout=10 -- a 'bash '"'"'/work dir/jobs/demo-20300102-030405/agent.sh'"'"' a'
ssh -T -o BatchMode=yes -o ConnectTimeout=10 -- b 'bash '"'"'/work dir/jobs/demo-20300102-030405/agent.sh'"'"' b'
