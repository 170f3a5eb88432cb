#!/bin/bash
# Two (or more) nodes on one machine: network namespaces joined by a bridge, an sshd in each, and
# DeepSpeed's multi-node launcher (hostfile, pdsh), to simulate a cluster.
#
#   tests/training/two_nodes.sh launch/pretrain.py --config x.yaml         # root; Linux
#   NODES=2 SLOTS=2 tests/training/two_nodes.sh launch/pretrain.py ...     # two ranks on each
#   KILL_NODE=1 KILL_WHEN=file tests/training/two_nodes.sh ...             # node 1 dies once `file` exists
#
# Needs iproute2, openssh-server and pdsh. It removes everything at its end. `--probe`
# checks whether it can run here (exit code 0) or prints why not (exit code 3).
set -euo pipefail
shopt -s nullglob

NODES=${NODES:-2}
SLOTS=${SLOTS:-1}
PORT=${PORT:-29555}
NAME=mp$$n
WORK=$(mktemp -d)
PYTHON_BIN=${PYTHON_BIN:-$(dirname "$(command -v python3)")}

unable() { echo "two nodes on one machine are not possible here: $*" >&2; exit 3; }

remove_everything() {
    [[ -z ${KILLER:-} ]] || kill "$KILLER" 2>/dev/null || true
    for ((i = 0; i < NODES; i++)); do
        # Only processes inside our own namespaces.
        pids=$(ip netns pids "$NAME$i" 2>/dev/null || true)
        [[ -z $pids ]] || kill -9 $pids 2>/dev/null || true
        ip link del "${NAME}v$i" 2>/dev/null || true
        ip netns del "$NAME$i" 2>/dev/null || true
    done
    ip link del "${NAME}br" 2>/dev/null || true
    rm -rf "$WORK"
}

check_machine() {
    [[ $(id -u) == 0 ]] || unable "this is not root"
    for tool in ip sshd pdsh unshare; do
        PATH=$PATH:/usr/sbin command -v "$tool" >/dev/null || unable "$tool is not installed"
    done
    ip netns add "${NAME}probe" 2>/dev/null || unable "network namespaces are not allowed"
    ip netns del "${NAME}probe"
    ip link add "${NAME}br" type bridge 2>/dev/null || unable "network bridges are not allowed"
}

make_keys() {
    ssh-keygen -q -t ed25519 -N '' -f "$WORK/id"
    ssh-keygen -q -t ed25519 -N '' -f "$WORK/hostkey"
    cp "$WORK/id.pub" "$WORK/authorized"
    mkdir -p /run/sshd "$WORK/bin"
    echo '127.0.0.1 localhost' > "$WORK/hosts"
    for ((i = 0; i < NODES; i++)); do
        echo "10.77.0.$((i + 1)) node$i" >> "$WORK/hosts"
        printf 'Host node%d\n  HostName 10.77.0.%d\n' "$i" "$((i + 1))" >> "$WORK/ssh_config"
        echo "node$i slots=$SLOTS" >> "$WORK/hostfile"
    done
    cat >> "$WORK/ssh_config" <<END
Host *
  User root
  IdentityFile $WORK/id
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
  ServerAliveInterval 3
  ServerAliveCountMax 3
END
    # ssh finds its configuration by the user, not by $HOME; deepspeed and pdsh find this one first.
    printf '#!/bin/sh\nexec /usr/bin/ssh -F %s/ssh_config "$@"\n' "$WORK" > "$WORK/bin/ssh"
    chmod +x "$WORK/bin/ssh"
}

make_node() {
    local i=$1 address=10.77.0.$(($1 + 1))
    ip netns add "$NAME$i"
    ip link add "${NAME}v$i" type veth peer name eth0 netns "$NAME$i"
    ip link set "${NAME}v$i" master "${NAME}br" up
    ip -n "$NAME$i" addr add "$address/24" dev eth0
    ip -n "$NAME$i" link set eth0 up
    ip -n "$NAME$i" link set lo up
    cat > "$WORK/sshd$i.conf" <<END
Port 22
ListenAddress $address
HostKey $WORK/hostkey
PidFile $WORK/sshd$i.pid
AuthorizedKeysFile $WORK/authorized
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
END
    # Each node has its host name and hosts file.
    ip netns exec "$NAME$i" unshare --uts --mount bash -c "
        hostname node$i
        mount --bind $WORK/hosts /etc/hosts
        exec $(PATH=$PATH:/usr/sbin command -v sshd) -D -f $WORK/sshd$i.conf -E $WORK/sshd$i.log
    " </dev/null &
    disown
}

wait_for_nodes() {
    for ((n = 0; n < 100; n++)); do
        ready=("$WORK"/sshd*.pid)
        [[ ${#ready[@]} == "$NODES" ]] && return
        sleep 0.1
    done
    cat "$WORK"/sshd*.log >&2
    unable "sshd does not start"
}

# A lost node, as others see it: first its network fails, then its processes end.
lose_node() {
    while [[ ! -e $KILL_WHEN ]]; do sleep 0.05; done
    ip link set "${NAME}v$KILL_NODE" down
    kill -9 $(ip netns pids "$NAME$KILL_NODE")
}

launch() {
    # Only variables in this file reach the nodes.
    cat > "$WORK/env" <<END
DS_ACCELERATOR=${DS_ACCELERATOR:-cpu}
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
GLOO_SOCKET_IFNAME=eth0
PYTHONPATH=${PYTHONPATH:-}
PATH=$PYTHON_BIN:/usr/local/bin:/usr/bin:/bin
END
    export PATH=$WORK/bin:$PYTHON_BIN:$PATH DS_ENV_FILE=$WORK/env
    export DS_ACCELERATOR=${DS_ACCELERATOR:-cpu}
    ip netns exec "${NAME}0" unshare --uts --mount bash -c '
        hostname node0; mount --bind "$0/hosts" /etc/hosts; shift 0; exec deepspeed "$@"
    ' "$WORK" --hostfile "$WORK/hostfile" --master_addr 10.77.0.1 --master_port "$PORT" "$@"
}

trap remove_everything EXIT
check_machine
[[ ${1:-} != --probe ]] || exit 0
ip link set "${NAME}br" up
make_keys
for ((i = 0; i < NODES; i++)); do make_node "$i"; done
wait_for_nodes
if [[ -n ${KILL_NODE:-} ]]; then
    lose_node &
    KILLER=$!
fi
launch "$@"
