//! The addresses of a guest, in the two forms that cloud-init reads.

use std::net::IpAddr;

use serde_json::{Value, json};

/// The addresses of a guest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GuestNetwork {
    /// Its interfaces, in their order.
    pub interfaces: Vec<GuestInterface>,
    /// Servers of names.
    pub nameservers: Vec<IpAddr>,
    /// Where names are looked for.
    pub search: Vec<String>,
}

/// One interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestInterface {
    /// How it is called.
    pub name: String,
    /// By what the guest knows it.
    pub mac: String,
    /// The largest packet.
    pub mtu: Option<u32>,
    /// Its addresses, and the length of each one's prefix. None means DHCP.
    pub addresses: Vec<(IpAddr, u8)>,
    /// The way out, if it is on this interface.
    pub gateway: Option<IpAddr>,
}

impl GuestNetwork {
    /// Version 1 of cloud-init's own form.
    pub(super) fn to_nocloud(&self) -> Value {
        let mut config: Vec<Value> = self
            .interfaces
            .iter()
            .map(GuestInterface::to_nocloud)
            .collect();
        if !self.nameservers.is_empty() || !self.search.is_empty() {
            config.push(json!({
                "type": "nameserver",
                "address": self.nameservers,
                "search": self.search,
            }));
        }
        json!({ "version": 1, "config": config })
    }

    /// OpenStack's form.
    pub(super) fn to_configdrive(&self) -> Value {
        let links = self.interfaces.iter().map(|interface| {
            let mut link = json!({
                "id": interface.name,
                "type": "phy",
                "ethernet_mac_address": interface.mac,
            });
            if let Some(mtu) = interface.mtu {
                link["mtu"] = mtu.into();
            }
            link
        });
        let links: Vec<Value> = links.collect();
        let networks: Vec<Value> = self
            .interfaces
            .iter()
            .flat_map(GuestInterface::to_configdrive)
            .collect();
        let services = self
            .nameservers
            .iter()
            .map(|address| json!({ "type": "dns", "address": address }));
        let services: Vec<Value> = services.collect();
        json!({ "links": links, "networks": networks, "services": services })
    }
}

impl GuestInterface {
    fn to_nocloud(&self) -> Value {
        let mut subnets: Vec<Value> = self
            .addresses
            .iter()
            .map(|(address, prefix)| {
                let mut subnet =
                    json!({ "type": "static", "address": format!("{address}/{prefix}") });
                if let Some(gateway) = self.gateway_for(address) {
                    subnet["gateway"] = gateway.to_string().into();
                }
                subnet
            })
            .collect();
        if subnets.is_empty() {
            subnets.push(json!({ "type": "dhcp" }));
        }
        let mut interface = json!({
            "type": "physical",
            "name": self.name,
            "mac_address": self.mac,
            "subnets": subnets,
        });
        if let Some(mtu) = self.mtu {
            interface["mtu"] = mtu.into();
        }
        interface
    }

    fn to_configdrive(&self) -> Vec<Value> {
        let id = |index: usize| format!("{}-{index}", self.name);
        if self.addresses.is_empty() {
            return vec![
                json!({ "id": id(0), "type": "ipv4_dhcp", "link": self.name, "network_id": id(0) }),
            ];
        }
        let networks = self
            .addresses
            .iter()
            .enumerate()
            .map(|(index, (address, prefix))| {
                let kind = if address.is_ipv4() { "ipv4" } else { "ipv6" };
                let mut network = json!({
                    "id": id(index),
                    "type": kind,
                    "link": self.name,
                    "network_id": id(index),
                    "ip_address": address,
                    "netmask": netmask(*address, *prefix),
                });
                if let Some(gateway) = self.gateway_for(address) {
                    let any = if address.is_ipv4() { "0.0.0.0" } else { "::" };
                    network["routes"] =
                        json!([{ "network": any, "netmask": any, "gateway": gateway }]);
                }
                network
            });
        networks.collect()
    }

    /// A way out is of one family.
    fn gateway_for(&self, address: &IpAddr) -> Option<IpAddr> {
        self.gateway
            .filter(|gateway| gateway.is_ipv4() == address.is_ipv4())
    }
}

fn netmask(address: IpAddr, prefix: u8) -> IpAddr {
    match address {
        IpAddr::V4(_) => {
            let host = 32u32.saturating_sub(u32::from(prefix));
            IpAddr::V4(u32::MAX.checked_shl(host).unwrap_or(0).into())
        }
        IpAddr::V6(_) => {
            let host = 128u32.saturating_sub(u32::from(prefix));
            IpAddr::V6(u128::MAX.checked_shl(host).unwrap_or(0).into())
        }
    }
}
